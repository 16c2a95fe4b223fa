"""Compare the results of a step on many devices with those on one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.types import PyTree
from replicator.errors import InvarianceError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One comparison with one replica and one microbatch.

    Attributes:
      what: The gradient of an optimizer, or the trajectory.
      replicas: Replicas compared; devices, under a strategy that partitions.
      accumulate: Microbatches compared.
      step: Number of updates before it.
      difference: Norm of the difference, relative to the norm on one replica.
      tolerance: Largest difference that law 1 allows.
      strategy: Name of the strategy that cut the step; None for replicas.
    """

    what: str
    replicas: int
    accumulate: int
    step: int
    difference: float
    tolerance: float
    strategy: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class InvarianceReport:
    """Report of all comparisons; `str` lists them.

    Attributes:
      comparisons: All comparisons; each within its tolerance.
      left_out: Parts that were not compared, and why.
    """

    comparisons: tuple[Comparison, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        """List the checks, and the largest difference of each kind."""
        worst: dict[str, Comparison] = {}
        for each in self.comparisons:
            if each.difference >= getattr(worst.get(each.what), "difference", 0.0):
                worst[each.what] = each
        lines = [
            f"{what}: {sum(each.what == what for each in self.comparisons)} "
            f"comparisons; largest difference {each.difference:.1e} of "
            f"{each.tolerance:.1e} allowed ({each.replicas} {_part(each)}s"
            f"{_under(each)}, {each.accumulate} microbatches, step {each.step})"
            for what, each in worst.items()
        ]
        return "\n".join([*lines, *(f"not checked: {text}" for text in self.left_out)])


def compared(
    found: PyTree, expected: PyTree, *, floor: float = 0.0, **about: Any
) -> Comparison:
    """Compare a tree with the expected one.

    Args:
      found: Arrays.
      expected: Arrays, as one device has them.
      floor: Least norm of `expected` to divide by.
      about: All other fields of the `Comparison`.

    Raises:
      InvarianceError: They are further apart than its tolerance.
    """
    distance = _difference(found, expected, floor=floor)
    comparison = Comparison(difference=distance, **about)
    # Written so that NaN fails, too.
    if comparison.difference <= comparison.tolerance:
        return comparison
    flat, _ = jax.tree_util.tree_flatten_with_path(found)
    apart = [
        (float(np.linalg.norm(_wide(leaf) - _wide(other))), path)
        for (path, leaf), other in zip(flat, jax.tree.leaves(expected), strict=True)
    ]
    _, path = max(apart, key=lambda each: each[0])
    worst = jax.tree_util.keystr(path, simple=True, separator="/")
    most = f", most at `{worst}`" if worst else ""
    raise InvarianceError(
        f"{comparison.what} must be the same on one {_part(comparison)} and on "
        f"{comparison.replicas}{_under(comparison)} at {comparison.accumulate} "
        f"microbatches, got a difference of {comparison.difference:.1e} of its norm "
        f"at step {comparison.step}{most} ({comparison.tolerance:.1e} is "
        f"allowed). {_hint(comparison)}"
    )


def norm(tree: PyTree) -> float:
    """Return the norm of all leaves together.

    >>> norm({"w": np.array([3.0]), "b": np.array(4.0)})
    5.0
    """
    return float(np.sqrt(sum(np.square(_wide(x)).sum() for x in jax.tree.leaves(tree))))


def _hint(comparison: Comparison) -> str:
    if comparison.strategy is not None and comparison.accumulate == 1:
        return (
            "XLA's partitioner may be at fault, which computes some writes and shifts "
            "of arrays that it cuts, and some grouped convolutions, wrongly. Use "
            "another strategy; or find the lines by leaving parts of the step out, and "
            "write them with `jnp.where` or `jnp.concatenate`."
        )
    own = "`replica_id`, per-replica norm, " if comparison.strategy is None else ""
    return f"Look for sums over examples, {own}or a loss that is not a mean."


def _part(comparison: Comparison) -> str:
    return "replica" if comparison.strategy is None else "device"


def _under(comparison: Comparison) -> str:
    return "" if comparison.strategy is None else f" under {comparison.strategy}"


def _difference(found: PyTree, expected: PyTree, *, floor: float = 0.0) -> float:
    """Return ‖found - expected‖ / max(‖expected‖, floor) over all leaves."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    if not all(
        np.array_equal(a, b)
        for a, b in pairs
        if not jnp.issubdtype(b.dtype, jnp.inexact)
    ):
        return np.inf
    # Counts and keys would be most of the norm.
    pairs = [(a, b) for a, b in pairs if jnp.issubdtype(b.dtype, jnp.inexact)]
    apart = norm([_wide(a) - _wide(b) for a, b in pairs])
    scale = max(norm([b for _, b in pairs]), floor)
    return apart / scale if scale > 0 else apart


def _wide(leaf: np.ndarray) -> np.ndarray:
    return np.asarray(leaf, np.float64)
