"""Noise, losses and a decay, for training and sampling generators."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.gan_layers import Labels
from replicator import example_keys
from replicator.base.trees import named_leaves
from replicator.base.types import Key
from replicator.errors import ArgumentError, check_number
from replicator.nnx import params_of


def draw(
    key: Key,
    n: int,
    *,
    latent: int,
    num_classes: int,
    truncation: float | None = None,
) -> tuple[Float[Array, "n latent"], Labels]:
    """Draw what a generator makes images of: latents and classes.

    Each follows its example to any cut of the global batch.

    Args:
      key: Random key, the same on all replicas.
      n: Examples of this replica in this microbatch.
      latent: Size of a latent vector.
      num_classes: How many classes there are.
      truncation: Values beyond it are drawn again ("truncation trick", §3.1): the
        smaller, the better and the more alike the images are; None for all values.

    Returns:
      Latents, normally distributed, and labels, each class as likely as another.

    Raises:
      ArgumentError: `truncation` is out of its range.
    """
    check_truncation(truncation)
    latent_keys, label_keys = (example_keys(each, n) for each in jax.random.split(key))

    def draw_latent(key: Key) -> Array:
        shape = (latent,)
        if truncation is None:
            return jax.random.normal(key, shape)
        return jax.random.truncated_normal(key, -truncation, truncation, shape)

    def draw_label(key: Key) -> Array:
        return jax.random.randint(key, (), 0, num_classes, jnp.int32)

    return jax.vmap(draw_latent)(latent_keys), jax.vmap(draw_label)(label_keys)


def check_truncation(truncation: float | None) -> None:
    """Refuse what no latents can be drawn within.

    Raises:
      ArgumentError: It is neither None nor above 0.
    """
    if truncation is None:
        return
    check_number("truncation", truncation)
    if not 0 < truncation < float("inf"):
        raise ArgumentError(
            f"`truncation` must be above 0 and finite, got {truncation}. Use 0.5 for "
            "images of the best quality, None for all that the generator can draw."
        )


def hinge_losses(
    real: Float[Array, "n"], drawn: Float[Array, "n"]
) -> Float[Array, "n"]:
    """Return a discriminator's loss of each pair of scores (Lim and Ye 2017).

    Args:
      real: Scores of real images.
      drawn: Scores of drawn ones; the generator's loss is minus those.
    """
    return jax.nn.relu(1 - real) + jax.nn.relu(1 + drawn)


def orthogonal_penalty(generator: nnx.Module) -> Float[Array, ""]:
    """Return how far outputs of each layer are from having filters at right angles.

    The sum over weights W of |WᵀW · (1 − I)|², §3.1, equation 3, without its factor
    (1e-4 in the paper). It makes a generator fit for truncation.

    Args:
      generator: Whose weights; the shared embedding does not count.
    """
    total = jnp.zeros(())
    for name, weight in named_leaves(params_of(generator)):
        if name.endswith("/kernel") and name != "embed/kernel":
            matrix = weight.reshape(-1, weight.shape[-1])
            gram = matrix.T @ matrix
            total += jnp.square(gram).sum() - jnp.square(jnp.diagonal(gram)).sum()
    return total


def warmed_decay(decay: float, updates: Int[Array, ""]) -> Float[Array, ""]:
    """Return the decay of an average that has seen so many updates.

    It rises to `decay`, so that an average of few updates is not mostly of what was
    there before any (TensorFlow's `ExponentialMovingAverage` with `num_updates`).

    >>> [round(float(warmed_decay(0.999, jnp.int32(n))), 3) for n in (0, 10, 100_000)]
    [0.1, 0.55, 0.999]
    """
    seen = updates.astype(jnp.float32)
    return jnp.minimum(decay, (1 + seen) / (10 + seen))
