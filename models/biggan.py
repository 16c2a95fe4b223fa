"""BigGAN: images of 16 to 256 pixels drawn to order, by class, in NNX.

Brock, Donahue and Simonyan 2018, "Large scale GAN training for high fidelity natural
image synthesis", §3, §4 and appendix B; the network for 32 pixels is that of Zhang et
al. 2018, "Self-attention generative adversarial networks", for small images, and the
one for 16 has a block less.

The generator's norms are class-conditional and span all replicas unless `norm` chooses
otherwise; every weight but the shared embedding is divided by its spectral norm. In
`train()` mode the norms use the batch and move; the generator samples in `eval()` mode,
best with `replicator.nnx.with_standing_statistics`.
"""

from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.gan_layers import (
    BOTTOM,
    ORTHOGONAL,
    GeneratorBlock,
    Images,
    Labels,
    Layers,
    MakeNorm,
    ProjectionDiscriminator,
    check_attention,
)
from replicator.collectives.moments import wider_dtype
from replicator.errors import ArgumentError, check_count
from replicator.nnx import BatchNorm


class _Plan(NamedTuple):
    """Widths along a network, in units of `channels`, and blocks that halve."""

    generator: tuple[int, ...]
    discriminator: tuple[int, ...]
    halvings: int


_PLANS = {
    16: _Plan((4, 4, 4), (4, 4, 4), 2),
    32: _Plan((4, 4, 4, 4), (4, 4, 4, 4), 2),
    64: _Plan((16, 16, 8, 4, 2), (1, 2, 4, 8, 16), 4),
    128: _Plan((16, 16, 8, 4, 2, 1), (1, 2, 4, 8, 16, 16), 5),
    256: _Plan((16, 16, 8, 8, 4, 2, 1), (1, 2, 4, 8, 8, 16, 16), 6),
}


class Generator(nnx.Module):
    """Draws images of given classes out of noise.

    Attributes:
      latent: Size of a latent vector.
      num_classes: How many classes there are.
    """

    def __init__(
        self,
        *,
        resolution: int,
        num_classes: int,
        channels: int = 96,
        image_channels: int = 3,
        latent: int = 120,
        shared: int = 128,
        attention: int | None = None,
        norm: MakeNorm = BatchNorm,
        compute_dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make an untrained generator.

        Args:
          resolution: Height and width of the images: 16, 32, 64, 128 or 256.
          num_classes: How many classes there are.
          channels: The unit of widths.
          image_channels: Of the images.
          latent: Size of a latent vector: a part for the first features and one for
            each block ("skip-z").
          shared: Size of a class's embedding, which all norms share.
          attention: Height of the features that attend to each other (64 in the paper);
            None for none.
          norm: Makes the norm in each class-conditional norm, and the last one.
          compute_dtype: Of the activations, for example `jnp.bfloat16`; None takes
            float32. Parameters, statistics and images are float32.
          rngs: Random keys for the parameters.

        Raises:
          ArgumentError: There is no such resolution, `latent` cannot be cut into equal
            parts, or no features have the height `attention`.
        """
        widths = [channels * width for width in _plan(resolution).generator]
        parts = len(widths)
        check_count("num_classes", num_classes)
        if latent % parts:
            raise ArgumentError(
                f"`latent` must be a multiple of {parts} at {resolution} pixels, a "
                f"part for each block and one for the first features, got {latent}. "
                f"Use {-(-latent // parts) * parts}."
            )
        heights = [BOTTOM * 2 ** (n + 1) for n in range(parts - 1)]
        check_attention(attention, heights)
        layers = Layers(rngs, compute_dtype)
        part = latent // parts
        self.embed = nnx.Linear(
            num_classes, shared, use_bias=False, kernel_init=ORTHOGONAL, rngs=rngs
        )
        self.first = layers.dense(part, BOTTOM**2 * widths[0])
        self.blocks = nnx.List(
            GeneratorBlock(
                *width,
                condition=part + shared,
                attends=height == attention,
                norm=norm,
                layers=layers,
            )
            for width, height in zip(pairwise(widths), heights, strict=True)
        )
        self.norm = norm(widths[-1], dtype=compute_dtype, rngs=rngs)
        self.last = layers.conv(widths[-1], image_channels, kernel=3)
        self.latent, self.num_classes = latent, num_classes

    def __call__(self, latents: Float[Array, "batch latent"], labels: Labels) -> Images:
        """Draw this replica's images.

        Args:
          latents: Noise, as of `draw`.
          labels: The class of each image.

        Returns:
          Pixels from -1 to 1, float32 at least.
        """
        full_dtype = wider_dtype(latents.dtype, jnp.float32)
        one_hot = jax.nn.one_hot(labels, self.num_classes, dtype=full_dtype)
        classes = self.embed(one_hot)
        first, *parts = jnp.split(latents, len(self.blocks) + 1, axis=1)
        x = self.first(first).reshape(len(latents), BOTTOM, BOTTOM, -1)
        for block, part in zip(self.blocks, parts, strict=True):
            x = block(x, jnp.concatenate([part, classes], axis=1))
        x = self.last(jax.nn.relu(self.norm(x)))
        return jnp.tanh(x.astype(full_dtype))


class Discriminator(ProjectionDiscriminator):
    """Discriminate images of a class from drawn ones."""

    def __init__(
        self,
        *,
        resolution: int,
        num_classes: int,
        channels: int = 96,
        image_channels: int = 3,
        attention: int | None = None,
        compute_dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make an untrained discriminator; arguments are those of `Generator`.

        Raises:
          ArgumentError: There is no such resolution, or no features have the height
            `attention`.
        """
        plan = _plan(resolution)
        super().__init__(
            [channels * width for width in plan.discriminator],
            resolution=resolution,
            halvings=plan.halvings,
            num_classes=num_classes,
            image_channels=image_channels,
            attention=attention,
            layers=Layers(rngs, compute_dtype),
        )


def _plan(resolution: int) -> _Plan:
    if resolution not in _PLANS:
        raise ArgumentError(
            f"`resolution` must be one of {sorted(_PLANS)}, got {resolution}. Resize "
            "the images."
        )
    return _PLANS[resolution]
