"""Compare what many devices made of a step with what one makes of it.

The rule is law 1's: a difference counts in the norm of all that belongs together, as
the moments of all parameters do, since a leaf whose true gradient is zero is nothing
but rounding. What shows gradients is measured by how far it moved, other state by what
it is, and metrics by the largest of them: a mean of what was whitened is zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.trees import leaf_path, named_leaves
from replicator.base.types import PyTree

GRADIENT_TOLERANCE = 1e-5 + 1e-6
"""Of the norm of the whole gradient, float32: law 1."""

SPLIT_TOLERANCE = 5e-5
"""The same where a strategy's axis `model` splits contractions."""

METRICS = "metrics"

_LEAST = float(np.finfo(np.float64).tiny)


class Compared(NamedTuple):
    """A result that is compared, of all that a step returns.

    Attributes:
      path: Of the leaf: `params/w`, or `metrics/loss`.
      group: What it belongs to: `opt/0/mu`, `queue`, `metrics/loss`.
      moves: Whether it shows gradients, and counts by how far it moved.
    """

    path: str
    group: str
    moves: bool

    @property
    def is_metric(self) -> bool:
        """Whether it is a metric."""
        return self.group.startswith(f"{METRICS}/")


def paths_and_groups(state: PyTree, metrics: PyTree) -> list[tuple[str, str]]:
    """Return the path of each leaf, and the group that it counts in.

    Fields of optax's innermost states are groups; else it is the top of the state.

    Args:
      state: The user's, unpadded; arrays or shapes.
      metrics: As the step returns them.
    """
    found: list[tuple[str, str]] = []
    nodes, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_innermost)
    for above, node in nodes:
        below = jax.tree_util.tree_flatten_with_path(node)[0]
        depth = len(above) + 1 if _is_innermost(node) else 1
        for path, _ in below:
            whole = (*above, *path)
            found.append((leaf_path(whole), leaf_path(whole[:depth])))
    told = [f"{METRICS}/{path}" for path, _ in named_leaves(metrics)]
    return [*found, *((path, path) for path in told)]


def differences(
    found: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    before: Sequence[np.ndarray],
    compared: Sequence[Compared | None],
) -> dict[str, float]:
    """Return by group how far results are apart, in parts of what they count as.

    A rounding of each result to its dtype is left out. Where a number is not finite
    there is nothing to measure, and the group is left out.

    Args:
      found: All results in order: the state, the metrics.
      expected: Likewise, of one device.
      before: The state before.
      compared: What each result is; None for one that is not compared.
    """
    squares: dict[str, float] = {}
    scales = _scales(expected, before, compared)
    for number, each in enumerate(compared):
        if each is None or not np.isfinite(scales[each.group]):
            continue
        one, other = _numbers(found[number]), _numbers(expected[number])
        off = np.inf
        if np.isfinite(one).all():
            rounding = float(jnp.finfo(expected[number].dtype).eps) * _norm(other)
            off = max(_norm(one - other) - rounding, 0.0)
        squares[each.group] = squares.get(each.group, 0.0) + off**2
    return {
        group: float(np.sqrt(square)) / max(scales[group], _LEAST)
        for group, square in squares.items()
    }


def farthest_leaf(
    group: str,
    found: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    compared: Sequence[Compared | None],
) -> str:
    """Return the path of the leaf of a group that differs most."""
    apart = {
        each.path: _norm(
            np.nan_to_num(_numbers(found[number]), nan=np.inf)
            - _numbers(expected[number])
        )
        for number, each in enumerate(compared)
        if each is not None and each.group == group
    }
    return max(apart, key=lambda path: apart[path])


def _scales(
    expected: Sequence[np.ndarray],
    before: Sequence[np.ndarray],
    compared: Sequence[Compared | None],
) -> Mapping[str, float]:
    squares: dict[str, float] = {}
    largest = 0.0
    for number, each in enumerate(compared):
        if each is None:
            continue
        value = _numbers(expected[number])
        if not np.isfinite(value).all():
            squares[each.group] = np.inf
            continue
        if each.is_metric and value.size:
            largest = max(largest, float(_norm(value) / np.sqrt(value.size)))
        if each.moves and not each.is_metric:
            value = value - _numbers(before[number])
        squares[each.group] = squares.get(each.group, 0.0) + _norm(value) ** 2
    scales = {group: float(np.sqrt(square)) for group, square in squares.items()}
    for number, each in enumerate(compared):
        if each is not None and each.is_metric:
            size = np.sqrt(max(expected[number].size, 1))
            scales[each.group] = max(scales[each.group], float(largest * size))
    return scales


def _is_innermost(node: Any) -> bool:
    if not _is_optax(node):
        return False
    below = jax.tree.leaves(node, is_leaf=lambda x: x is not node and _is_optax(x))
    return not any(_is_optax(each) and jax.tree.leaves(each) for each in below)


def _is_optax(node: Any) -> bool:
    return type(node).__module__.partition(".")[0] == "optax"


def _numbers(leaf: np.ndarray) -> np.ndarray:
    wide = np.complex128 if np.iscomplexobj(leaf) else np.float64
    return np.asarray(leaf).astype(wide).ravel()


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))
