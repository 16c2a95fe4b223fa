"""List the variables of a state, and the parameters that an optimizer's follow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.padded import is_padded
from replicator.base.trees import leaf_path
from replicator.base.types import InitFn, PyTree
from replicator.errors import check_function

_OPTIMIZERS = ("opt", "opt_state", "optimizer")
_PARAMETERS = ("params", "model")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """One array of a state.

    Attributes:
      path: Its path in the user's state: `params/dense/kernel`; for a flax NNX
        `Variable` its own, without the `value` in it.
      shape: Its global shape.
      dtype: Name of its dtype.
      follows: Path of the variable whose rule decides. For moments of an optimizer that
        is their parameter: the longest common end of paths among arrays of the same
        shape. Of equals, the longest common beginning; then the most names that the
        moment's path has, too (`opt_gen` has `gen`); then one in `params` or `model`,
        rather than in a copy beside it; then the first. For all others it is `path`.
      is_optimizer: Whether it is in the state of an optimizer.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    follows: str
    is_optimizer: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array; 0 for random keys, which are never cut."""
        if self.dtype.startswith("key<"):
            return 0
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def variables_of(state: PyTree) -> tuple[Variable, ...]:
    """List the variables of a state, in the order of its leaves.

    Arrays in a node of optax's own types, in the state of a wrapped optimizer, or under
    `opt`, `opt_state`, `optimizer` or `opt_*` at the top of the state, are an
    optimizer's; but not the `model` right below, as in `nnx.ModelAndOptimizer`.

    Args:
      state: Arrays or `jax.ShapeDtypeStruct`s, the user's part of a run's state. An
        array that is kept with padding counts without.

    >>> params = {"w": jnp.ones((4, 2))}
    >>> state = {"params": params, "opt": optax.trace(0.9).init(params)}
    >>> [(each.path, each.follows) for each in variables_of(state)]
    [('opt/trace/w', 'params/w'), ('params/w', 'params/w')]
    """
    found: list[tuple[str, Any, bool]] = []
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: _is_optimizer(node) or is_padded(node)
    )
    for above, node in nodes:
        leaves = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_padded)[0]
        for below, leaf in leaves:
            parts = path_names((*above, *below))
            by_kind = _is_optimizer(node)
            found.append(("/".join(parts), leaf, by_kind or _named_optimizer(parts)))
    parameters: dict[tuple[int, ...], list[str]] = {}
    for path, leaf, is_optimizer in found:
        if not is_optimizer:
            parameters.setdefault(np.shape(leaf), []).append(path)
    return tuple(
        Variable(
            path=path,
            shape=np.shape(leaf),
            dtype=str(getattr(leaf, "dtype", None) or jnp.result_type(leaf)),
            follows=_parameter_of(path, parameters.get(np.shape(leaf), ()))
            if is_optimizer
            else path,
            is_optimizer=is_optimizer,
        )
        for path, leaf, is_optimizer in found
    )


def variables_made_by(init_fn: InitFn) -> tuple[Variable, ...]:
    """List the variables of the state that `init_fn(key)` returns; nothing runs.

    Raises:
      ArgumentError: `init_fn` is not a function of a key.

    >>> [each.path for each in variables_made_by(lambda key: {"w": jnp.ones(3)})]
    ['w']
    """
    check_function("init_fn", init_fn, "key")
    return variables_of(jax.eval_shape(init_fn, jax.random.key(0)))


def path_names(path: tuple) -> list[str]:
    """Return the names of a path of `jax.tree_util`, as rules name variables.

    >>> path_names((jax.tree_util.DictKey("w"), jax.tree_util.GetAttrKey("value")))
    ['w']
    """
    # A flax NNX `Variable` is a node with one leaf, `value`; gradients, and with them
    # the moments of an optimizer, are named without it.
    inner = path[:-1] if path[-1:] == (jax.tree_util.GetAttrKey("value"),) else path
    return [leaf_path((entry,)) for entry in inner]


def _is_optimizer(node: Any) -> bool:
    # By name: the module that wraps optimizers is above strategies.
    kind = type(node)
    return kind.__module__.partition(".")[0] == "optax" or (
        kind.__name__ == "OptimizerState"
    )


def _named_optimizer(parts: list[str]) -> bool:
    # At the top alone: below it, `optical` or `option` are names of a model.
    is_one = parts[:1] and (parts[0] in _OPTIMIZERS or parts[0].startswith("opt_"))
    return bool(is_one) and parts[1:2] != ["model"]


def _parameter_of(path: str, candidates: Sequence[str]) -> str:
    own = path.split("/")
    names = f"_{path.replace('/', '_')}_"

    def likeness(candidate: str) -> tuple[int, int, int, bool]:
        other = candidate.split("/")
        start = _common(own, other)
        named = sum(f"_{part}_" in names for part in other)
        is_parameter = start < len(other) and other[start] in _PARAMETERS
        return _common(own[::-1], other[::-1]), start, named, is_parameter

    return max(candidates, key=likeness, default=path)


def _common(one: list[str], other: list[str]) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return (*same, False).index(False)
