"""Batch normalisation whose statistics are those of the batch on all replicas.

A norm is three verbs, and its mode is which of them are called:

    windows = make_windows(len(x), stats="all")
    moments = batch_moments(x, windows)                                   # moments.py
    y = normalize(x, moments, scale=scale, bias=bias)
    running = update_running(running, pooled(moments, windows), momentum=0.9)  # train
    standing, batches = update_standing(standing, pooled(moments, windows), batches)
    y = normalize(x, running)                                             # frozen

Training moves an exponential average (Ioffe and Szegedy 2015, §3.1). Frozen statistics
are used and do not move. Standing statistics weigh every batch alike: before sampling
with fixed weights a generator sees many batches and then uses their average (Brock et
al. 2018, "Large scale GAN training", §4 and appendix B). Variances are biased: running
ones too, as in flax, so that training and evaluation normalise alike.

Under accumulation each average moves once per update, by the mean over the microbatches
of their moments: each adds its share, and only the first one ages the old value.
`replicator.nnx.BatchNorm` is this as a module.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from replicator.collectives.microbatch import is_last_microbatch, microbatch
from replicator.collectives.moments import Moments, wider_dtype


class RunningMoments(NamedTuple):
    """Mean and biased variance, averaged over the batches of many updates."""

    mean: Float[Array, "features"]
    var: Float[Array, "features"]


@functools.partial(jax.jit, static_argnames="epsilon", inline=True)
def normalize(
    x: Float[Array, "batch *positions features"],
    moments: Moments | RunningMoments,
    *,
    scale: Float[Array, "features"] | None = None,
    bias: Float[Array, "features"] | None = None,
    epsilon: float = 1e-5,
) -> Float[Array, "batch *positions features"]:
    """Subtract the mean, divide by the standard deviation, then scale and shift.

    Args:
      x: This replica's examples.
      moments: Of the windows the examples lie in, or running ones for all of them.
      scale: Factor per feature ("gamma"); 1 if None.
      bias: Offset per feature ("beta"); 0 if None.
      epsilon: Added to the variance.

    Returns:
      The normalised examples, in the wider of the dtypes of `x` and `moments`.
    """
    dtype = wider_dtype(x.dtype, moments.mean.dtype)
    factor = _per_example(lax.rsqrt(moments.var + epsilon), x).astype(dtype)
    if scale is not None:
        factor = factor * _per_example(scale, x).astype(dtype)
    y = (x.astype(dtype) - _per_example(moments.mean, x).astype(dtype)) * factor
    return y if bias is None else y + _per_example(bias, x).astype(dtype)


def update_running(
    running: RunningMoments, moments: Moments, *, momentum: float | Float[Array, ""]
) -> RunningMoments:
    """Move an exponential average by the moments of this batch, once per update.

    After k microbatches it is `momentum · old + (1 − momentum) · new`, where `new` is
    the mean of their moments; one without any weight leaves the average where it is.

    Args:
      running: The average so far.
      moments: Of one window, equal on all replicas: from `pooled`.
      momentum: What is kept of the old value, in [0, 1).

    Returns:
      The average that counts this microbatch.
    """
    here = microbatch()
    done = jnp.asarray(here.index, running.mean.dtype) / here.count
    keep = jnp.where(done == 0, momentum, 1.0)
    share = (1 - momentum) / here.count
    # The weights in the sum so far: less than 1 from the second microbatch on.
    mass = jnp.where(done == 0, 1.0, momentum + (1 - momentum) * done)

    def move(old: Array, new: Array) -> Array:
        new = jnp.where(moments.weight > 0, new[0].astype(old.dtype), old / mass)
        return keep * old + share * new

    return RunningMoments(
        move(running.mean, moments.mean), move(running.var, moments.var)
    )


def update_standing(
    standing: RunningMoments, moments: Moments, batches: Float[Array, ""]
) -> tuple[RunningMoments, Float[Array, ""]]:
    """Let a plain mean over all batches so far count this one too, once per update.

    Args:
      standing: The mean so far; anything finite before the first batch.
      moments: Of one window, equal on all replicas: from `pooled`.
      batches: How many updates the mean counts so far.

    Returns:
      The mean that counts this microbatch, and the number of updates it counts.
    """
    moved = update_running(standing, moments, momentum=batches / (batches + 1))
    return moved, batches + is_last_microbatch().astype(batches.dtype)


def _per_example(
    stat: Float[Array, "*windows features"],
    x: Float[Array, "batch *positions features"],
) -> Float[Array, "batch *ones features"]:
    """Give each example the value of its window, or the one value for all."""
    by_window = stat.reshape(-1, 1, stat.shape[-1])
    windows, _, features = by_window.shape
    each = jnp.broadcast_to(by_window, (windows, len(x) // windows, features))
    return each.reshape(len(x), *[1] * (x.ndim - 2), features)
