"""Batch normalisation whose statistics are those of the batch on all replicas.

A norm is three functions, and its mode decides which of them are called:

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
of their moments. A microbatch, window or replica may hold no real example: a window of
weight 0 normalises to 0 and has no gradient, and an update without a real example
leaves the average as it is. The average has room for itself alone, so how many
microbatches will count has to be known at the first one: it is for padding
(`Microbatch.real`). One that turns out empty otherwise leaves the average so far where
it is: those before it then count less than those after it. And a norm may move once in
each microbatch: with several, a second call in a step is refused (`moved_averages`).
`replicator.nnx.BatchNorm` is this as a module.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from replicator.collectives.context.microbatch import (
    is_last_microbatch,
    microbatch,
    real_microbatches,
)
from replicator.collectives.markers import mark_moved
from replicator.collectives.moments import Moments, per_example, wider_dtype


class RunningMoments(NamedTuple):
    """Mean and biased variance, averaged over the batches of many updates.

    >>> RunningMoments(mean=jnp.zeros(3), var=jnp.ones(3)).mean.shape
    (3,)
    """

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
      moments: Moments of the windows of the examples, or running ones for all of them.
      scale: Factor per feature ("gamma"); 1 if None.
      bias: Offset per feature ("beta"); 0 if None.
      epsilon: Added to the variance.

    Returns:
      The normalised examples, in the wider of the dtypes of `x` and `moments`; 0 in a
      window of weight 0, whatever it holds.

    >>> running = RunningMoments(mean=jnp.array([1.0]), var=jnp.array([4.0]))
    >>> normalize(jnp.array([[3.0]]), running, epsilon=0.0)
    Array([[1.]], dtype=float32)
    """
    dtype = wider_dtype(x.dtype, moments.mean.dtype)
    var = moments.var
    if isinstance(moments, Moments):
        real = moments.weight[:, None] > 0
        x = jnp.where(per_example(real, x), x, 0)  # the mean there is 0
        var = jnp.where(real, var, 1)
        bias = None if bias is None else jnp.where(real, bias[None], 0)
    factor = per_example(lax.rsqrt(var + epsilon), x).astype(dtype)
    if scale is not None:
        factor = factor * per_example(scale, x).astype(dtype)
    y = (x.astype(dtype) - per_example(moments.mean, x).astype(dtype)) * factor
    return y if bias is None else y + per_example(bias, x).astype(dtype)


def update_running(
    running: RunningMoments, moments: Moments, *, momentum: float | Float[Array, ""]
) -> RunningMoments:
    """Move an exponential average by the moments of this batch, once per update.

    After k microbatches it is `momentum · old + (1 − momentum) · new`, where `new` is
    the mean of their moments. One without weight, or with padding alone, leaves the
    average bit for bit where it is; where padding is known (`Microbatch.real`) those
    with real examples then move it as if they were all.

    Args:
      running: The average so far.
      moments: Moments of one window, equal on all replicas: from `pooled`.
      momentum: Share of the old value that is kept, in [0, 1).

    Returns:
      The average that counts this microbatch.
    """
    return _moved(running, moments, momentum, _place(moments, running.mean.dtype))


def update_standing(
    standing: RunningMoments, moments: Moments, batches: Float[Array, ""]
) -> tuple[RunningMoments, Float[Array, ""]]:
    """Let a plain mean over all batches so far count this one too, once per update.

    Args:
      standing: The mean so far; anything finite before the first batch.
      moments: Moments of one window, equal on all replicas: from `pooled`.
      batches: Number of updates that the mean counts so far; plus a half within an
        update that it counts already.

    Returns:
      The mean that counts this microbatch, and the number of updates it counts: one
      without a real example does not count.
    """
    place = _place(moments, standing.mean.dtype)
    whole = jnp.floor(batches)
    # Until one counts, the average has no share for those before.
    place = place._replace(done=jnp.where(batches > whole, place.done, 0))
    moved = _moved(standing, moments, whole / (whole + 1), place)
    # Reading the index keeps the half from microbatch to microbatch: what reads neither
    # it nor the batch moves once per update.
    begun = place.counts & jnp.asarray(microbatch().index >= 0)
    batches = jnp.where(begun, whole + 0.5, batches)
    return moved, jnp.where(is_last_microbatch(), jnp.ceil(batches), batches)


class _Place(NamedTuple):
    """Number of microbatches that count before this one and in all; if it counts."""

    done: Float[Array, ""]
    total: Float[Array, ""]
    counts: Bool[Array, ""]


def _place(moments: Moments, dtype: DTypeLike) -> _Place:
    here, real = microbatch(), real_microbatches()
    weighs = moments.weight[0] > 0
    if real is None:
        done, total = jnp.asarray(here.index, dtype), jnp.asarray(here.count, dtype)
        return _Place(done, total, weighs)
    done = (real & (jnp.arange(len(real)) < here.index)).sum(dtype=dtype)
    # At least 1: in an update of padding alone nothing moves.
    total = jnp.maximum(real.sum(dtype=dtype), 1)
    return _Place(done, total, weighs & real[here.index])


def _moved(
    average: RunningMoments, moments: Moments, momentum: float | Array, place: _Place
) -> RunningMoments:
    """Give a microbatch the share that all will have after the last."""
    # Weight of the average so far, if it has weight 1 after the last microbatch.
    before = momentum + (1 - momentum) * place.done / place.total
    share = (1 - momentum) / place.total

    def move(old: Array, new: Array) -> Array:
        new = new[0].astype(old.dtype)
        moved = (before * old + share * new) / (before + share)
        return mark_moved(jnp.where(place.counts, moved.astype(old.dtype), old), old)

    return RunningMoments(
        move(average.mean, moments.mean), move(average.var, moments.var)
    )
