"""Mean and variance of a batch that lies on many replicas, without cancellation.

`E[x²] − E[x]²` loses every digit where |mean| ≫ std: in float32 at mean 1e4, std 1 it
is 0…8. Here both are sums of deviations from a shift, corrected for the error of the
shift (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance",
eq. 1.7; merging partial results: eq. 2.1 with the shift as the common origin):

    d = x − shift        mean = shift + E[d]        var = E[d²] − E[d]²

The shift is the mean itself, as far as float32 holds it: it takes one all-reduce of
`features` numbers, and E[d²] takes another. E[d] is then the mean's rounding error.
Replicas that share do not send it, which changes the variance by the square of that
error: by 1e-6 of itself at |mean| = 1e4·std, by 1e-4 at 1e5·std. One all-reduce would
do with the running mean as shift, but that is 0 in a new model, and a gather of every
replica's moments grows with the number of replicas.

The shift is a constant to differentiation, and the formula holds for every constant:
derivatives of all orders are right (a gradient penalty takes the second), those of E[d]
included. The backward pass needs a single all-reduce, of both sums.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from replicator.base.mesh import REPLICA_AXIS
from replicator.collectives.context.axes import (
    num_replicas,
    refuse_if_partitioned,
    resolve_axis,
)
from replicator.collectives.markers import norm_scope
from replicator.errors import ArgumentError, check_count

Groups: TypeAlias = Sequence[Sequence[int]]
"""Disjoint groups of equal size that name every replica once."""

Stats: TypeAlias = str | int | Groups
"""Replicas that share statistics: `"all"`, each `"replica"` for itself, runs of so many
consecutive replicas, or explicit groups of replicas."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Examples that share statistics, as each replica sees it.

    Attributes:
      per_replica: Equal runs of examples into which each replica's batch is cut.
      groups: Replicas that share their windows; a group of one shares with no other.
        None as a group: no sharing by choice, for any number of replicas.
    """

    per_replica: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def is_whole_batch(self) -> bool:
        """True if a single window holds the examples of all replicas."""
        return self.per_replica == 1 and len(self.groups) == 1


class Moments(NamedTuple):
    """Mean, biased variance and total weight of each window of this replica."""

    mean: Float[Array, "windows features"]
    var: Float[Array, "windows features"]
    weight: Float[Array, "windows"]


def make_windows(
    replica_batch: int, *, stats: Stats = "all", stats_batch: int | None = None
) -> Windows:
    """Lay windows of statistics over the replicas of the step being traced.

    A replica that is alone, as outside a replicated step, is a group by itself.

    Args:
      replica_batch: Number of examples on each replica in this microbatch.
      stats: Replicas that share statistics: `"all"`, each `"replica"` for itself, runs
        of so many consecutive replicas, or groups of replicas given one by one.
      stats_batch: Share over fixed runs of so many consecutive examples of the global
        batch instead. The answer then depends neither on the number of replicas nor
        on that of microbatches.

    Returns:
      The windows, the same description on every replica.

    Raises:
      ArgumentError: The arguments exclude each other or do not fit the replicas.

    >>> make_windows(8, stats_batch=4).per_replica
    2
    """
    check_stats(stats, stats_batch)
    if stats != "all":
        refuse_if_partitioned(
            f"`stats={stats!r}`", "Use 'all', or `stats_batch` for fixed windows."
        )
    replicas = num_replicas()
    if stats_batch is not None:
        return _example_windows(stats_batch, replica_batch, replicas)
    return Windows(per_replica=1, groups=_replica_groups(stats, replicas))


def check_stats(stats: Stats, stats_batch: int | None) -> None:
    """Refuse a choice of statistics that is wrong for any number of replicas.

    Args:
      stats: As for `make_windows`.
      stats_batch: As for `make_windows`.

    Raises:
      ArgumentError: The choice is unknown, not positive, or made twice.

    >>> check_stats("all", None)
    >>> check_stats("some", None)
    Traceback (most recent call last):
    replicator.errors.ArgumentError: `stats` must be 'all', 'replica', a number of...
    """
    if isinstance(stats, str) and stats not in ("all", "replica"):
        raise ArgumentError(
            f"`stats` must be 'all', 'replica', a number of replicas or groups of "
            f"them, got {stats!r}. Use 'all' for statistics over the global batch."
        )
    if isinstance(stats, int):
        check_count("stats", stats, "Use 'replica' or 'all'.")
    if stats_batch is not None and stats != "all":
        raise ArgumentError(
            f"`stats` must be 'all' where `stats_batch` is given, got {stats!r}. "
            f"Leave one of them out."
        )
    if stats_batch is not None:
        remedy = "Use None for statistics over the global batch."
        check_count("stats_batch", stats_batch, remedy)


# Networks have many norms of few shapes: each shape is traced once, and inlined.
@functools.partial(jax.jit, static_argnames="windows", inline=True)
def batch_moments(
    x: Float[Array, "batch *positions features"],
    windows: Windows,
    *,
    weight: Shaped[Array, "batch"] | None = None,
) -> Moments:
    """Compute the moments of each window over its examples and their positions.

    Differentiable to any order; gradients are those of one device with all examples.

    Args:
      x: This replica's examples.
      windows: Examples that share statistics, from `make_windows`.
      weight: Weight of each example; 0 for padding, whatever it holds. A window of
        weight 0 has mean 0 and variance 0, and no gradient.

    Returns:
      The moments of this replica's windows, in float32 at least; replicas of one group
      hold equal ones.

    >>> x = jnp.array([[1.0], [3.0]])
    >>> batch_moments(x, make_windows(2)).var
    Array([[1.]], dtype=float32)
    """
    x = x.astype(wider_dtype(x.dtype, jnp.float32))
    if weight is not None:
        weight = weight.astype(x.dtype)
        x = jnp.where(weight.reshape(-1, *[1] * (x.ndim - 1)) > 0, x, 0)
    shift, total = _location(x, windows, weight)
    deviation = x - per_example(shift, x)
    sums = (
        _window_sum(part, windows, weight)
        for part in (deviation, jnp.square(deviation))
    )
    rest, square = (
        _divide(part, total) for part in _sums_about_mean(windows.groups, *sums)
    )
    var = jnp.maximum(square - jnp.square(rest), 0)
    return Moments(shift + rest, var, total[:, 0])


def pooled(moments: Moments, windows: Windows) -> Moments:
    """Average the moments of all windows of all replicas, for running statistics.

    The variance is the mean of those of the windows, which normalised the batch;
    without the scatter of their means.

    Args:
      moments: Moments of this replica's windows.
      windows: The windows they were computed over.

    Returns:
      Moments of one window, equal on every replica and constant to differentiation.
    """
    moments = jax.tree.map(lax.stop_gradient, moments)
    if windows.is_whole_batch:
        return moments
    mass = moments.weight[:, None]
    everyone = (tuple(range(num_replicas())),)
    parts = (mass * moments.mean, mass * moments.var, mass)
    sums = (part.sum(axis=0, keepdims=True) for part in parts)
    mean, var, weight = _all_reduce(everyone, *sums)
    return Moments(_divide(mean, weight), _divide(var, weight), weight[:, 0])


def per_example(
    stat: Shaped[Array, "*windows width"],
    x: Float[Array, "batch *positions features"],
) -> Shaped[Array, "batch *ones width"]:
    """Give each example the value of its window, or the one value for all.

    Args:
      stat: A row of each of this replica's windows, or of all.
      x: This replica's examples.

    Returns:
      A row of each example, of as many axes as `x`.
    """
    by_window = stat.reshape(-1, 1, stat.shape[-1])
    windows, _, width = by_window.shape
    each = jnp.broadcast_to(by_window, (windows, len(x) // windows, width))
    return each.reshape(len(x), *[1] * (x.ndim - 2), width)


def wider_dtype(*dtypes: DTypeLike) -> jnp.dtype:
    """Return the dtype that holds the values of all, also under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes, jnp.dtype(dtypes[0]))


def _example_windows(stats_batch: int, replica_batch: int, replicas: int) -> Windows:
    if replica_batch % stats_batch == 0:
        return Windows(
            per_replica=replica_batch // stats_batch, groups=_runs(replicas, 1)
        )
    span, rest = divmod(stats_batch, replica_batch)
    if rest or replicas % span:
        raise ArgumentError(
            f"`stats_batch` must divide each replica's {replica_batch} examples, or "
            f"span whole replicas evenly, got {stats_batch} for {replicas} replicas. "
            f"Use {math.gcd(stats_batch, replica_batch)}, or change the global batch."
        )
    return Windows(per_replica=1, groups=_runs(replicas, span))


def _replica_groups(stats: Stats, replicas: int) -> tuple[tuple[int, ...], ...]:
    if stats in ("replica", 1):
        return ()
    if stats == "all" or replicas == 1:
        return _runs(replicas, replicas)
    if isinstance(stats, int):
        if replicas % stats:
            raise ArgumentError(
                f"`stats` must divide the number of replicas, got {stats} for "
                f"{replicas}. Use {math.gcd(stats, replicas)}, or `stats_batch` for "
                f"statistics that do not depend on the number of replicas."
            )
        return _runs(replicas, stats)
    return _explicit_groups(stats, replicas)


def _explicit_groups(stats: Stats, replicas: int) -> tuple[tuple[int, ...], ...]:
    assert not isinstance(stats, str | int)
    groups = tuple(tuple(group) for group in stats)
    named = sorted(replica for group in groups for replica in group)
    if named != list(range(replicas)) or len({len(group) for group in groups}) != 1:
        raise ArgumentError(
            f"`stats` must name each of the {replicas} replicas once, in groups of "
            f"equal size, got {groups}. Give a group size for consecutive replicas."
        )
    return groups


def _runs(replicas: int, size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(range(start, start + size)) for start in range(0, replicas, size)
    )


def _location(
    x: Float[Array, "batch *positions features"],
    windows: Windows,
    weight: Float[Array, "batch"] | None,
) -> tuple[Float[Array, "windows features"], Float[Array, "windows 1"]]:
    """Return the mean of each window, a constant, and the weight of its examples."""
    x = lax.stop_gradient(x)
    if weight is None:
        # Constants: to distinguish full windows from empty ones costs nothing here.
        examples = len(x) // windows.per_replica
        own = jnp.full((windows.per_replica, 1), examples, x.dtype)
    else:
        own = weight.reshape(windows.per_replica, -1).sum(axis=1, keepdims=True)
    located = _window_sum(x, windows, weight)
    if _is_shared(windows.groups):
        # To the last digit: nothing corrects an error of this.
        rough = _divide(located, own)
        located += _window_sum(x - per_example(rough, x), windows, weight)
    if weight is None:
        [located] = _all_reduce(windows.groups, located)
        total = own * len(windows.groups[0] if windows.groups else [0])
    else:
        located, total = _all_reduce(windows.groups, located, own)
    return lax.stop_gradient(_divide(located, total)), total


def _window_sum(
    x: Float[Array, "batch *positions features"],
    windows: Windows,
    weight: Float[Array, "batch"] | None,
) -> Float[Array, "windows features"]:
    """Add up the examples of each window here, each the mean of its positions."""
    each = x.mean(axis=tuple(range(1, x.ndim - 1)))
    if weight is not None:
        each = weight[:, None] * each
    return each.reshape(windows.per_replica, -1, each.shape[-1]).sum(axis=1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sums_about_mean(groups: Groups, rest: Array, square: Array) -> tuple[Array, Array]:
    """Add up deviations from the mean over the group, and their squares.

    The former come to 0 but for rounding, so only their derivatives are sent.
    """
    if not _is_shared(groups):
        rest, square = _all_reduce(groups, rest, square)
        return rest, square
    [square] = _all_reduce(groups, square)
    return jnp.zeros_like(rest), square


@_sums_about_mean.defjvp
def _sums_about_mean_jvp(
    groups: Groups, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    rest, square = _all_reduce(groups, *tangents)
    return _sums_about_mean(groups, *primals), (rest, square)


def _is_shared(groups: Groups) -> bool:
    return bool(groups) and len(groups[0]) > 1


def _all_reduce(groups: Groups, *parts: Array) -> list[Array]:
    """Add up over the group, in a single all-reduce."""
    alone = not groups or len(groups[0]) == 1 < len(groups)
    if alone or resolve_axis(REPLICA_AXIS).name is None:
        return list(parts)
    packed = jnp.concatenate(parts, axis=-1)
    # All replicas are no group: the replication proof trusts whole axes only, and has
    # to see one also where there is a single replica.
    chosen = None if len(groups) == 1 else groups
    with norm_scope():
        packed = lax.psum(packed, REPLICA_AXIS, axis_index_groups=chosen)
    ends = list(itertools.accumulate(part.shape[-1] for part in parts))
    return jnp.split(packed, ends[:-1], axis=-1)


def _divide(
    total: Float[Array, "windows features"], weight: Float[Array, "windows 1"]
) -> Float[Array, "windows features"]:
    return total / jnp.where(weight > 0, weight, 1)
