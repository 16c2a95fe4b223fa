"""Compare the results of a step on many devices with those of one.

The rule is law 1's: a difference counts in the norm of a whole group, such as the
moments of all parameters, since a leaf whose true gradient is zero is nothing but
rounding. A leaf that shows gradients is measured by how far it moved, other state by
its value, and metrics by the largest of them: a mean of whitened numbers is zero.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.strategies.variables import variables_of

GRADIENT_TOLERANCE = 1e-5 + 1e-6
"""Of the norm of the whole gradient, float32: law 1."""

SPLIT_TOLERANCE = 5e-5
"""The same where a strategy's axis `model` splits contractions."""

_METRICS = "metrics/"
_LEAST = float(np.finfo(np.float64).tiny)


class Compared(NamedTuple):
    """A result of a step that is compared.

    Attributes:
      path: Path of the leaf: `params/w`, or `metrics/loss`.
      group: Group of the leaf: `opt/0/mu`, `queue`, `metrics/loss`.
      moves: Whether it shows gradients, and counts by how far it moved.
    """

    path: str
    group: str
    moves: bool


def law(mesh: Mesh) -> float:
    """Return the largest difference of gradients on a mesh, in parts of their norm.

    >>> float(f"{law(jax.make_mesh((1,), ('replica',))):.2g}")
    1.1e-05
    """
    is_split = mesh.shape.get("model", 1) > 1
    return SPLIT_TOLERANCE if is_split else GRADIENT_TOLERANCE


def paths_and_groups(state: PyTree, metrics: PyTree) -> list[tuple[str, str]]:
    """Return the path of each leaf, and its group.

    State of an optimizer for all parameters under one name is a group, and so are all
    other leaves below one name at the top of the state.

    Args:
      state: The user's state, unpadded; arrays or shapes.
      metrics: Metrics of the step.

    >>> paths_and_groups({"params": {"w": 1.0}}, {"loss": 2.0})
    [('params/w', 'params'), ('metrics/loss', 'metrics/loss')]
    """
    found = []
    for each in variables_of(state):
        own, other = each.path.split("/"), each.follows.split("/")
        alike = [a == b for a, b in zip(own[::-1], other[::-1], strict=False)]
        end = (*alike, False).index(False)
        above = own[:-end] if end < len(own) and each.is_optimizer else own[:1]
        found.append((each.path, "/".join(above)))
    named = [_METRICS + path for path, _ in named_leaves(metrics)]
    return [*found, *zip(named, named, strict=True)]


def differences(
    found: Sequence,
    expected: Sequence,
    before: Sequence,
    compared: Sequence[Compared | None],
) -> dict[str, float]:
    """Return the difference of results by group, in parts of the group's norm.

    A rounding of each result to its dtype is left out. If a number is not finite on one
    device there is nothing to measure, and the group is left out.

    Args:
      found: All results in order: the state, the metrics.
      expected: Likewise, of one device.
      before: The state before.
      compared: Description of each result; None for one that is not compared.
    """
    off, scale, largest = {}, {}, _LEAST
    for number, each in enumerate(compared):
        if each is None:
            continue
        one, other = _numbers(found[number]), _numbers(expected[number])
        is_metric = each.group.startswith(_METRICS)
        with np.errstate(invalid="ignore"):
            rounding = float(jnp.finfo(expected[number].dtype).eps) * _norm(other)
            apart = max(_norm(one - other) - rounding, 0.0)
            if is_metric:
                size = np.sqrt(max(other.size, 1))
                apart, counts = apart / size, _norm(other) / size
                largest = max(largest, counts) if np.isfinite(counts) else largest
            elif each.moves:
                counts = _norm(other - _numbers(before[number]))
            else:
                counts = _norm(other)
        apart = apart if np.isfinite(one).all() else np.inf
        off[each.group] = np.hypot(off.get(each.group, 0.0), apart)
        scale[each.group] = np.hypot(scale.get(each.group, 0.0), counts)
    return {
        group: float(apart / (largest if group.startswith(_METRICS) else of))
        for group, apart in off.items()
        if np.isfinite(of := max(scale[group], _LEAST))
    }


def farthest_leaf(
    group: str,
    found: Sequence,
    expected: Sequence,
    compared: Sequence[Compared | None],
) -> str:
    """Return the path of the leaf of a group that differs most."""
    apart = {
        each.path: _norm(_numbers(found[number]) - _numbers(expected[number]))
        for number, each in enumerate(compared)
        if each is not None and each.group == group
    }
    return max(apart, key=lambda path: np.nan_to_num(apart[path], nan=np.inf))


def _numbers(leaf: np.ndarray) -> np.ndarray:
    wide = np.complex128 if np.iscomplexobj(leaf) else np.float64
    return np.asarray(leaf).astype(wide).ravel()


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))
