"""Compare what a program left with what its oracle left: each leaf, each metric."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from replicator.base.per_replica import PerReplica
from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.engine.step.optimizer_state import OptimizerState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Apart:
    """The leaf that is farthest from the truth.

    Attributes:
      path: Of the leaf.
      by: Norm of the difference, relative to what it is measured by.
    """

    path: str
    by: float


def seen(tree: PyTree) -> dict[str, np.ndarray]:
    """List the leaves of a state as an oracle names them: plain optimizers, dicts."""

    def open_up(node: PyTree) -> PyTree:
        match node:
            case OptimizerState(skipped=None, scale=None):
                return open_all(node.inner)
            case OptimizerState(scale=None):
                return {"inner": open_all(node.inner), "skipped": node.skipped}
            case OptimizerState():
                kept = {"skipped": node.skipped, "scale": node.scale}
                return {"inner": open_all(node.inner), **kept}
            case PerReplica():
                return node.value
            case nnx.Optimizer():
                return {"step": node.step[...], "opt": open_all(node.opt_state)}
            case nnx.Pytree():
                return nnx.to_pure_dict(nnx.state(node))
        return node

    def open_all(tree: PyTree) -> PyTree:
        return jax.tree.map(open_up, tree, is_leaf=_is_special)

    return {path: _host(leaf) for path, leaf in named_leaves(open_all(tree))}


def farthest(
    found: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    start: dict[str, np.ndarray] | None,
    *,
    tolerance: float,
) -> Apart:
    """Return the worst leaf; `by` is at most 1 if all are within their tolerance.

    A leaf is measured by how far it moved since `start`, or a hundredth of how far all
    did: weights that hardly move would hide a wrong update. Without `start` it is
    measured by itself. Integers and booleans are equal or not.
    """
    if odd := sorted(found.keys() ^ expected.keys()):
        where = "the oracle" if odd[0] in found else "the program"
        return Apart(path=f"{odd[0]} (missing in {where})", by=np.inf)
    worst = Apart(path="", by=0.0)
    for path, by in distances(found, expected, start, tolerance=tolerance).items():
        if not by <= worst.by:  # NaN is the worst
            worst = Apart(path=path, by=by)
    return worst


def distances(
    found: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    start: dict[str, np.ndarray] | None,
    *,
    tolerance: float,
) -> dict[str, float]:
    """Return how far each leaf is off, as `farthest` measures it; the same paths."""
    floor = 0.01
    if start is not None:
        moved = [_norm(expected[path], start[path]) for path in found]
        floor *= float(np.sqrt(np.square(moved).sum()))
    return {
        path: _distance(
            leaf,
            expected[path],
            None if start is None else start[path],
            floor,
            tolerance,
        )
        for path, leaf in found.items()
    }


def _distance(
    leaf: np.ndarray,
    truth: np.ndarray,
    first: np.ndarray | None,
    floor: float,
    tolerance: float,
) -> float:
    if leaf.shape != truth.shape or leaf.dtype != truth.dtype:
        return np.inf
    if np.array_equal(leaf, truth):
        return 0.0
    if not jnp.issubdtype(leaf.dtype, np.inexact):
        return np.inf
    # What is kept in fewer bits than the program computes in (running statistics are
    # always float32) is rounded at every update.
    bits = 2e-6 if leaf.dtype == np.float32 else 0.0
    away = np.zeros_like(truth) if first is None else first
    scale = max(_norm(truth, away), floor)
    return _norm(leaf, truth) / (max(tolerance, bits) * scale)


def _norm(one: np.ndarray, other: np.ndarray) -> float:
    wide = np.complex128 if np.iscomplexobj(one) else np.float64
    return float(np.linalg.norm(np.ravel(one.astype(wide) - other.astype(wide))))


def _is_special(node: Any) -> bool:
    return isinstance(node, OptimizerState | PerReplica | nnx.Pytree)


def _host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)
