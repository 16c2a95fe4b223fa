"""SNGAN: images of 8, 16, 32 and more pixels drawn to order, by class, in NNX.

Miyato et al. 2018, "Spectral normalization for generative adversarial networks",
appendix B, table 4: the networks for CIFAR-10, all of one width; a smaller or larger
image has a block less or more for each halving or doubling. As in Miyato and Koyama
2018, "cGANs with projection discriminator", a class has its own factors and offsets in
the generator's norms, and the discriminator projects its features on it.

Only the discriminator's weights are divided by their spectral norms. They are
orthogonal at first (Glorot-uniform in the paper).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.gan_layers import (
    BOTTOM,
    GeneratorBlock,
    Images,
    Labels,
    Layers,
    MakeNorm,
    ProjectionDiscriminator,
)
from replicator.collectives.moments import wider_dtype
from replicator.errors import ArgumentError, check_count, check_whole
from replicator.nnx import BatchNorm


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
        channels: int = 256,
        image_channels: int = 3,
        latent: int = 128,
        norm: MakeNorm = BatchNorm,
        compute_dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make an untrained generator.

        Args:
          resolution: Height and width of the images: 8, 16, 32 and so on.
          num_classes: How many classes there are.
          channels: Width of all features.
          image_channels: Of the images.
          latent: Size of a latent vector.
          norm: Makes the norm in each class-conditional norm, and the last one.
          compute_dtype: Of the activations, for example `jnp.bfloat16`; None takes
            float32. Parameters, statistics and images are float32.
          rngs: Random keys for the parameters.

        Raises:
          ArgumentError: `resolution` is none of those, or there is no class.
        """
        doublings = _doublings(resolution)
        check_count("num_classes", num_classes)
        layers = Layers(rngs, compute_dtype, spectral=False)
        self.first = layers.dense(latent, BOTTOM**2 * channels)
        self.blocks = nnx.List(
            GeneratorBlock(
                channels,
                channels,
                condition=num_classes,
                attends=False,
                norm=norm,
                layers=layers,
            )
            for _ in range(doublings)
        )
        self.norm = norm(channels, dtype=compute_dtype, rngs=rngs)
        self.last = layers.conv(channels, image_channels, kernel=3)
        self.latent, self.num_classes = latent, num_classes

    def __call__(self, latents: Float[Array, "batch latent"], labels: Labels) -> Images:
        """Draw this replica's images.

        Args:
          latents: Noise, as of `models.gan_training.draw`.
          labels: The class of each image.

        Returns:
          Pixels from -1 to 1, float32 at least.
        """
        full_dtype = wider_dtype(latents.dtype, jnp.float32)
        classes = jax.nn.one_hot(labels, self.num_classes, dtype=full_dtype)
        x = self.first(latents).reshape(len(latents), BOTTOM, BOTTOM, -1)
        for block in self.blocks:
            x = block(x, classes)
        x = self.last(jax.nn.relu(self.norm(x)))
        return jnp.tanh(x.astype(full_dtype))


class Discriminator(ProjectionDiscriminator):
    """Discriminate images of a class from drawn ones."""

    def __init__(
        self,
        *,
        resolution: int,
        num_classes: int,
        channels: int = 128,
        image_channels: int = 3,
        compute_dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make an untrained discriminator; arguments are those of `Generator`.

        Its blocks halve images of 16 pixels and more to 8, those of 8 to 4; two more
        leave the height as it is.

        Raises:
          ArgumentError: `resolution` is none of those, or there is no class.
        """
        halvings = max(1, _doublings(resolution) - 1)
        super().__init__(
            [channels] * (halvings + 2),
            resolution=resolution,
            halvings=halvings,
            num_classes=num_classes,
            image_channels=image_channels,
            layers=Layers(rngs, compute_dtype),
        )


def _doublings(resolution: int) -> int:
    """Return how often the generator's first features are doubled."""
    check_whole("resolution", resolution)
    doublings = int(resolution).bit_length() - BOTTOM.bit_length()
    if doublings < 1 or resolution != BOTTOM << doublings:
        raise ArgumentError(
            f"`resolution` must be 8, 16, 32 or another power of 2 from 8 on, got "
            f"{resolution}. Resize the images."
        )
    return doublings
