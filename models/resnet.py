"""Residual networks, version 1.5, in NNX.

He et al. 2015, "Deep residual learning for image recognition", table 1, changed as in
Goyal et al. 2017, "Accurate, large minibatch SGD", §5.1: a bottleneck strides in its
3×3 convolution, and the last norm of each block starts at 0, so that a new block passes
on what it gets. Norms span all replicas unless `norm` is another.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from replicator.collectives.moments import wider_dtype
from replicator.errors import ArgumentError
from replicator.nnx import BatchNorm

Images: TypeAlias = Float[Array, "batch height width channels"]
Features: TypeAlias = Float[Array, "batch _ _ _"]
Weight: TypeAlias = Shaped[Array, "batch"] | None

MakeNorm: TypeAlias = Callable[..., BatchNorm]
"""`BatchNorm`, or a partial of it: `functools.partial(BatchNorm, stats="replica")`."""

TENSOR_PARALLEL = {"*/conv/kernel": (None, None, None, "model")}
"""Rules for `strategies.tensor_parallel`: the outputs of convolutions are cut."""

_STAGES = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
_HE_NORMAL = jax.nn.initializers.variance_scaling(2.0, "fan_out", "normal")


class ResNet(nnx.Module):
    """A residual network that classifies images."""

    def __init__(
        self,
        depth: int,
        num_classes: int,
        *,
        width: int = 64,
        in_channels: int = 3,
        stem: str = "imagenet",
        norm: MakeNorm = BatchNorm,
        compute_dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make an untrained network.

        Args:
          depth: 18 or 34 (basic blocks), 50, 101 or 152 (bottlenecks).
          num_classes: Number of logits.
          width: Channels of the first stage; each later stage doubles them.
          in_channels: Channels of the images.
          stem: `"imagenet"` divides height and width by 4 before the first stage,
            `"small"`, for images of 8 to 32 pixels, leaves them.
          norm: Makes each norm; a partial of `BatchNorm` chooses its statistics.
          compute_dtype: Of the activations, for example `jnp.bfloat16`; None takes that
            of the images, float32 at least. Parameters are float32.
          rngs: Random keys for the parameters.

        Raises:
          ArgumentError: `depth` or `stem` is not one of these.
        """
        if depth not in _STAGES:
            raise ArgumentError(
                f"`depth` must be one of {sorted(_STAGES)}, got {depth}. Use 18 or 50."
            )
        if stem not in _STEMS:
            raise ArgumentError(
                f"`stem` must be one of {sorted(_STEMS)}, got {stem!r}. "
                f"Use 'small' for images of up to 32 pixels."
            )
        unit = functools.partial(
            ConvNorm, norm=norm, compute_dtype=compute_dtype, rngs=rngs
        )
        self.stem = _STEMS[stem](in_channels, width, unit)
        block = BasicBlock if depth < 50 else Bottleneck
        blocks, channels = [], width
        for stage, repeats in enumerate(_STAGES[depth]):
            for index in range(repeats):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(channels, width * 2**stage, stride, unit))
                channels = blocks[-1].out_channels
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(
            channels,
            num_classes,
            kernel_init=jax.nn.initializers.normal(0.01),
            rngs=rngs,
        )
        self.compute_dtype = compute_dtype

    def __call__(
        self, images: Images, *, weight: Weight = None
    ) -> Float[Array, "batch classes"]:
        """Compute the logits of this replica's images.

        Args:
          images: Pixels in any float dtype, about zero mean and unit variance.
          weight: How much each image counts in batch statistics; 0 for padding.

        Returns:
          Unnormalised log-probabilities, in float32 at least.
        """
        full_dtype = wider_dtype(images.dtype, jnp.float32)
        x = self.stem(images.astype(self.compute_dtype or full_dtype), weight)
        for block in self.blocks:
            x = block(x, weight)
        return self.head(x.astype(full_dtype).mean(axis=(1, 2)))


class ConvNorm(nnx.Module):
    """A convolution without bias, then batch norm: the unit of everything here."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel: int,
        stride: int = 1,
        zero_init: bool = False,
        norm: MakeNorm,
        compute_dtype: DTypeLike | None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make one unit.

        Args:
          in_channels: Channels of the input.
          out_channels: Channels of the output.
          kernel: Height and width of the filters.
          stride: Step between filters.
          zero_init: Start with outputs of 0.
          norm: Makes the norm.
          compute_dtype: Of the activations; None takes that of the inputs.
          rngs: Random keys for the parameters.
        """
        reach = kernel // 2
        self.conv = nnx.Conv(
            in_channels,
            out_channels,
            (kernel, kernel),
            strides=stride,
            padding=((reach, reach), (reach, reach)),
            use_bias=False,
            dtype=compute_dtype,
            kernel_init=_HE_NORMAL,
            rngs=rngs,
        )
        scale_init = (
            jax.nn.initializers.zeros if zero_init else jax.nn.initializers.ones
        )
        self.norm = norm(
            out_channels, dtype=compute_dtype, scale_init=scale_init, rngs=rngs
        )

    def __call__(self, x: Features, weight: Weight) -> Features:
        """Filter, then normalise."""
        return self.norm(self.conv(x), weight=weight)


MakeUnit: TypeAlias = Callable[..., ConvNorm]


class ImagenetStem(nnx.Module):
    """A 7×7 convolution and a max pool, each of stride 2."""

    def __init__(self, in_channels: int, width: int, unit: MakeUnit) -> None:
        """Make the stem for images of `in_channels`."""
        self.conv = unit(in_channels, width, kernel=7, stride=2)

    def __call__(self, x: Features, weight: Weight) -> Features:
        """Divide height and width by 4."""
        x = jax.nn.relu(self.conv(x, weight))
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))  # 0 is the least after ReLU
        return nnx.max_pool(x, (3, 3), strides=(2, 2))


class SmallStem(nnx.Module):
    """A 3×3 convolution that keeps every pixel (He et al. 2015, §4.2)."""

    def __init__(self, in_channels: int, width: int, unit: MakeUnit) -> None:
        """Make the stem for images of `in_channels`."""
        self.conv = unit(in_channels, width, kernel=3)

    def __call__(self, x: Features, weight: Weight) -> Features:
        """Leave height and width."""
        return jax.nn.relu(self.conv(x, weight))


class BasicBlock(nnx.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(
        self, in_channels: int, channels: int, stride: int, unit: MakeUnit
    ) -> None:
        """Make a block whose first convolution strides."""
        self.out_channels = channels
        self.first = unit(in_channels, channels, kernel=3, stride=stride)
        self.last = unit(channels, channels, kernel=3, zero_init=True)
        self.shortcut = _shortcut(in_channels, channels, stride, unit)

    def __call__(self, x: Features, weight: Weight) -> Features:
        """Add what the convolutions make of `x` to `x`."""
        y = jax.nn.relu(self.first(x, weight))
        return _add(x, self.last(y, weight), self.shortcut, weight)


class Bottleneck(nnx.Module):
    """A 3×3 convolution at a quarter of the channels, between two of 1×1."""

    def __init__(
        self, in_channels: int, channels: int, stride: int, unit: MakeUnit
    ) -> None:
        """Make a block whose 3×3 convolution strides."""
        self.out_channels = 4 * channels
        self.reduce = unit(in_channels, channels, kernel=1)
        self.spatial = unit(channels, channels, kernel=3, stride=stride)
        self.expand = unit(channels, self.out_channels, kernel=1, zero_init=True)
        self.shortcut = _shortcut(in_channels, self.out_channels, stride, unit)

    def __call__(self, x: Features, weight: Weight) -> Features:
        """Add what the convolutions make of `x` to `x`."""
        y = jax.nn.relu(self.reduce(x, weight))
        y = jax.nn.relu(self.spatial(y, weight))
        return _add(x, self.expand(y, weight), self.shortcut, weight)


_STEMS = {"imagenet": ImagenetStem, "small": SmallStem}


def _shortcut(
    in_channels: int, out_channels: int, stride: int, unit: MakeUnit
) -> ConvNorm | None:
    """Return a projection where the shapes differ; None is the identity."""
    if stride == 1 and in_channels == out_channels:
        return None
    return unit(in_channels, out_channels, kernel=1, stride=stride)


def _add(
    x: Features, y: Features, shortcut: ConvNorm | None, weight: Weight
) -> Features:
    return jax.nn.relu(y + (x if shortcut is None else shortcut(x, weight)))
