"""Blocks of generators and discriminators, in NNX; BigGAN and SNGAN are made of them.

Miyato et al. 2018, "Spectral normalization for generative adversarial networks",
appendix B, figure 5, and Brock et al. 2018, appendix B, figure 15.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from replicator.collectives.moments import wider_dtype
from replicator.errors import ArgumentError, check_count
from replicator.nnx import BatchNorm, SpectralNorm

Images: TypeAlias = Float[Array, "batch height width channels"]
# Blocks change height, width and number of features: those are not held equal.
Features: TypeAlias = Float[Array, "batch _height _width _features"]
Labels: TypeAlias = Int[Array, "batch"]
Condition: TypeAlias = Float[Array, "batch condition"]

MakeNorm: TypeAlias = Callable[..., BatchNorm]
"""`BatchNorm`, or a partial of it: `functools.partial(BatchNorm, stats="replica")`."""

BOTTOM = 4
"""Height and width of a generator's first features."""

ORTHOGONAL = jax.nn.initializers.orthogonal()


class Layers(NamedTuple):
    """Makes the layers of a network.

    Attributes:
      rngs: Random keys for the parameters.
      compute_dtype: Of the activations; None takes that of the inputs.
      spectral: Whether weights are divided by their spectral norms.
    """

    rngs: nnx.Rngs
    compute_dtype: DTypeLike | None = None
    spectral: bool = True

    def conv(
        self, into: int, out: int, *, kernel: int, use_bias: bool = True
    ) -> nnx.Module:
        """Make a convolution that keeps height and width."""
        layer = nnx.Conv(
            into,
            out,
            (kernel, kernel),
            use_bias=use_bias,
            dtype=self.compute_dtype,
            kernel_init=ORTHOGONAL,
            rngs=self.rngs,
        )
        return self._normed(layer)

    def dense(self, into: int, out: int, *, use_bias: bool = True) -> nnx.Module:
        """Make a linear layer."""
        layer = nnx.Linear(
            into,
            out,
            use_bias=use_bias,
            dtype=self.compute_dtype,
            kernel_init=ORTHOGONAL,
            rngs=self.rngs,
        )
        return self._normed(layer)

    def _normed(self, layer: nnx.Module) -> nnx.Module:
        return SpectralNorm(layer, rngs=self.rngs) if self.spectral else layer


class ProjectionDiscriminator(nnx.Module):
    """Discriminate real from drawn images of a class, by a projection on the class.

    Miyato and Koyama 2018, "cGANs with projection discriminator".
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        resolution: int,
        halvings: int,
        num_classes: int,
        image_channels: int,
        attention: int | None = None,
        layers: Layers,
    ) -> None:
        """Make an untrained discriminator.

        Args:
          widths: Features after each block.
          resolution: Height and width of the images.
          halvings: How many blocks halve height and width, the first ones.
          num_classes: How many classes there are.
          image_channels: Of the images.
          attention: Height of the features that attend to each other; None for none.
          layers: Makes layers.

        Raises:
          ArgumentError: No features have the height `attention`.
        """
        check_count("num_classes", num_classes)
        heights = [resolution >> min(n, halvings) for n in range(1, 1 + len(widths))]
        check_attention(attention, heights)
        self.blocks = nnx.List(
            DiscriminatorBlock(
                *width,
                halves=n < halvings,
                is_first=n == 0,
                attends=height == attention,
                layers=layers,
            )
            for n, (width, height) in enumerate(
                zip(pairwise([image_channels, *widths]), heights, strict=True)
            )
        )
        self.score = layers.dense(widths[-1], 1)
        self.embed = layers.dense(num_classes, widths[-1], use_bias=False)
        self.num_classes = num_classes
        self.compute_dtype = layers.compute_dtype

    def __call__(self, images: Images, labels: Labels) -> Float[Array, "batch"]:
        """Score this replica's images.

        Args:
          images: Pixels from -1 to 1.
          labels: The class that each is to be of.

        Returns:
          Scores, float32 at least: the higher, the more it looks like a real one.
        """
        full_dtype = wider_dtype(images.dtype, jnp.float32)
        x = images.astype(self.compute_dtype or full_dtype)
        for block in self.blocks:
            x = block(x)
        x = jax.nn.relu(x).astype(full_dtype).sum(axis=(1, 2))
        classes = self.embed(jax.nn.one_hot(labels, self.num_classes, dtype=x.dtype))
        of_class = (classes.astype(x.dtype) * x).sum(axis=1)
        return self.score(x)[:, 0].astype(full_dtype) + of_class


class ConditionalNorm(nnx.Module):
    """Batch norm whose factors and offsets follow from what each image is to be.

    De Vries et al. 2017, "Modulating early visual processing by language", as the paper
    has it: linear in the condition, and near a plain norm at first.
    """

    def __init__(
        self, features: int, *, condition: int, norm: MakeNorm, layers: Layers
    ) -> None:
        """Make a norm of `features` for conditions of the size `condition`."""
        self.norm = norm(
            features,
            use_scale=False,
            use_bias=False,
            dtype=layers.compute_dtype,
            rngs=layers.rngs,
        )
        self.scale = layers.dense(condition, features, use_bias=False)
        self.bias = layers.dense(condition, features, use_bias=False)

    def __call__(self, x: Features, condition: Condition) -> Features:
        """Normalise, then scale and shift each image by its own."""
        scale = 1 + self.scale(condition)[:, None, None]
        return self.norm(x) * scale + self.bias(condition)[:, None, None]


class GeneratorBlock(nnx.Module):
    """Two convolutions beside a shortcut, at twice the height of the input."""

    def __init__(
        self,
        into: int,
        out: int,
        *,
        condition: int,
        attends: bool,
        norm: MakeNorm,
        layers: Layers,
    ) -> None:
        """Make a block; with `attends`, its outputs attend to each other."""
        self.norms = nnx.List(
            ConditionalNorm(each, condition=condition, norm=norm, layers=layers)
            for each in (into, out)
        )
        self.convs = nnx.List(layers.conv(each, out, kernel=3) for each in (into, out))
        self.shortcut = layers.conv(into, out, kernel=1)
        self.attention = Attention(out, layers=layers) if attends else None

    def __call__(self, x: Features, condition: Condition) -> Features:
        """Add what the convolutions make of `x` to `x`."""
        y = _doubled(jax.nn.relu(self.norms[0](x, condition)))
        y = self.convs[0](y)
        y = self.convs[1](jax.nn.relu(self.norms[1](y, condition)))
        # A convolution of 1x1 and doubling commute; this way it has a quarter to do.
        y = y + _doubled(self.shortcut(x))
        return y if self.attention is None else self.attention(y)


class DiscriminatorBlock(nnx.Module):
    """Two convolutions beside a shortcut, which may halve the height of the input."""

    def __init__(
        self,
        into: int,
        out: int,
        *,
        halves: bool,
        is_first: bool,
        attends: bool,
        layers: Layers,
    ) -> None:
        """Make a block; the first one gets pixels, which no ReLU is to cut."""
        self.convs = nnx.List(layers.conv(each, out, kernel=3) for each in (into, out))
        # Where nothing changes its shape, the input is added as it is.
        changes = halves or into != out
        self.shortcut = layers.conv(into, out, kernel=1) if changes else None
        self.attention = Attention(out, layers=layers) if attends else None
        self.halves, self.is_first = halves, is_first

    def __call__(self, x: Features) -> Features:
        """Add what the convolutions make of `x` to `x`."""
        y = self.convs[0](x if self.is_first else jax.nn.relu(x))
        y = self.convs[1](jax.nn.relu(y))
        if self.halves:
            x, y = _halved(x), _halved(y)
        y = y + (x if self.shortcut is None else self.shortcut(x))
        return y if self.attention is None else self.attention(y)


class Attention(nnx.Module):
    """Features at each place take in those at all others (Zhang et al. 2018, §3)."""

    def __init__(self, features: int, *, layers: Layers) -> None:
        """Make a layer that at first leaves its input as it is."""
        narrow, half = max(1, features // 8), max(1, features // 2)
        self.query = layers.conv(features, narrow, kernel=1, use_bias=False)
        self.key = layers.conv(features, narrow, kernel=1, use_bias=False)
        self.value = layers.conv(features, half, kernel=1, use_bias=False)
        self.out = layers.conv(half, features, kernel=1, use_bias=False)
        self.strength = nnx.Param(jnp.zeros(()))

    def __call__(self, x: Features) -> Features:
        """Add to each place a mean of the others, weighed by likeness."""
        batch, height, width, _ = x.shape

        def rows(y: Features) -> Float[Array, "batch places features"]:
            return y.reshape(batch, -1, y.shape[-1])

        query = rows(self.query(x))
        key, value = (
            rows(nnx.max_pool(make(x), (2, 2), strides=(2, 2)))
            for make in (self.key, self.value)
        )
        likeness = jnp.einsum("bqf,bkf->bqk", query, key)
        likeness = likeness.astype(wider_dtype(likeness.dtype, jnp.float32))
        weights = jax.nn.softmax(likeness).astype(value.dtype)
        mean = jnp.einsum("bqk,bkf->bqf", weights, value)
        y = self.out(mean.reshape(batch, height, width, -1))
        return x + self.strength[...].astype(x.dtype) * y


def check_attention(attention: int | None, heights: Sequence[int]) -> None:
    """Refuse a height that no features have.

    Raises:
      ArgumentError: `attention` is such a height.
    """
    if attention is not None and attention not in heights:
        raise ArgumentError(
            f"`attention` must be None or one of {sorted(set(heights))}, the heights "
            f"of features, got {attention}. Use {max(heights)}."
        )


def _doubled(x: Features) -> Features:
    return x.repeat(2, axis=1).repeat(2, axis=2)


def _halved(x: Features) -> Features:
    batch, height, width, features = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, features).mean((2, 4))
