"""Runs of MaxText's decoders that its authors published, as data.

From the repository AI-Hypercomputer/maxtext, `MaxText/configs/v5e/README.md` and
`MaxText/configs/v5p/README.md`, and the scripts beside them: sequences of 2,048,
SwiGLU, a head of its own over 32,000 words, heads of 128, bfloat16 with weights and
Adam in float32, attention by a flash kernel. No constant of the cost model was fitted
to them.
"""

import dataclasses

SEQUENCE = 2048
VOCABULARY = 32_000
HEAD_SIZE = 128


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """Sizes of a decoder."""

    name: str
    width: int
    heads: int
    hidden: int
    layers: int

    @property
    def parameters(self) -> int:
        """Number of its parameters, but for norms."""
        attention = 4 * self.width * self.heads * HEAD_SIZE
        per_layer = attention + 3 * self.width * self.hidden
        return self.layers * per_layer + 2 * VOCABULARY * self.width

    def flops(self, sequences: int) -> float:
        """Operations of a step as MaxText counts them: causal, nothing recomputed."""
        products = 6 * self.parameters * SEQUENCE
        attention = 6 * self.heads * HEAD_SIZE * self.layers * SEQUENCE**2
        return sequences * (products + attention)


DECODERS = {
    each.name: each
    for each in (
        Decoder(name="16B", width=4096, heads=64, hidden=28_672, layers=32),
        Decoder(name="32B", width=8192, heads=64, hidden=28_672, layers=32),
        Decoder(name="64B", width=8192, heads=64, hidden=28_672, layers=64),
        Decoder(name="128B", width=8192, heads=128, hidden=57_344, layers=64),
        Decoder(name="256B", width=16_384, heads=128, hidden=57_344, layers=64),
        Decoder(name="512B", width=16_384, heads=128, hidden=57_344, layers=128),
        Decoder(name="1024B", width=16_384, heads=256, hidden=114_688, layers=128),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """One row of a published table.

    Attributes:
      decoder: Name of the model.
      topology: One slice.
      sequences: Of a chip, in a step.
      tensor: Number of chips that share a copy of each layer; the others share weights.
      remat: Whether each layer is computed again, or keeps its products with weights.
      teraflops: Per second and chip, as published, by number of slices.
    """

    decoder: str
    topology: str
    sequences: int
    teraflops: dict[int, float]
    tensor: int = 1
    remat: bool = True

    def seconds(self, slices: int = 1) -> float:
        """Return the seconds of a step that the published speed comes to."""
        flops = DECODERS[self.decoder].flops(self.sequences)
        return flops / (self.teraflops[slices] * 1e12)


def _v5e(
    name: str, sequences: int, *teraflops: float, tensor: int = 1, remat: bool = True
) -> Run:
    return Run(
        decoder=name,
        topology="v5e:16x16",
        sequences=sequences,
        tensor=tensor,
        remat=remat,
        teraflops=dict(zip((1, 2, 4, 8, 16, 32), teraflops, strict=True)),
    )


V5E = (
    _v5e("16B", 6, 120, 117, 117, 115, 111, 108),
    _v5e("32B", 4, 132, 128, 126, 125, 123, 119),
    _v5e("64B", 2, 118, 112, 110, 108, 105, 99),
    # Its activations are kept in the host's memory: what that costs is not known here.
    _v5e("128B", 1, 110, 110, 108, 104, 100, 91, tensor=16, remat=False),
)


def _v5p(
    name: str, topology: str, sequences: int, tensor: int, remat: bool, tera: float
) -> Run:
    return Run(
        decoder=name,
        topology=f"v5p:{topology}",
        sequences=sequences,
        tensor=tensor,
        remat=remat,
        teraflops={1: tera},
    )


V5P = (
    _v5p("32B", "4x4x4", 7, 4, False, 328),
    _v5p("64B", "4x4x4", 3, 4, False, 323),
    _v5p("128B", "4x8x8", 1, 8, False, 316),
    _v5p("256B", "8x8x8", 1, 8, False, 308),
    _v5p("512B", "8x8x8", 2, 8, True, 294),
    _v5p("1024B", "8x16x16", 2, 8, True, 297),
)
