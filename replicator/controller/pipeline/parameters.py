"""Parameters of stages: what is shared, and which stage a leaf belongs to."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicator.base.trees import leaf_path, named_leaves
from replicator.base.types import PyTree
from replicator.errors import ArgumentError


def check_params(
    params: Sequence[PyTree], stages: int, shared: Mapping[str, str]
) -> None:
    """Refuse parameters that do not fit the stages.

    Raises:
      ArgumentError: There are more or fewer, one is no floating point array, or a path
        of `shared` is not there.
    """
    if len(params) != stages:
        raise ArgumentError(
            f"`params` must be a list with a tree for each of the {stages} stages, got "
            f"{len(params)}. Pass `{{}}` for a stage without parameters."
        )
    found = dict(named_leaves(list(params), is_leaf=_is_none))
    for path, leaf in found.items():
        if leaf is not None and not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ArgumentError(
                f"`params` must be floating point arrays, got {jnp.result_type(leaf)} "
                f"for `{path}`. Bind others to the stage by `functools.partial`."
            )
    for copy, owner in shared.items():
        if found.get(copy, owner) is not None or found.get(owner) is None:
            raise ArgumentError(
                "`shared` must have paths of parameters that are None, each with that "
                f"of the array in its place, got {copy!r} and {owner!r} of "
                f"{sorted(found)}. Write both as 'stage/name'."
            )


def filled(params: Sequence[PyTree], shared: Mapping[str, str]) -> list[PyTree]:
    """Return the parameters of stages, with those in place that they share.

    >>> filled([{"table": 1.0}, {"table": None}], {"1/table": "0/table"})
    [{'table': 1.0}, {'table': 1.0}]
    """
    found = dict(named_leaves(list(params), is_leaf=_is_none))
    return _mapped(
        lambda path, leaf: found[shared[path]] if path in shared else leaf, params
    )


def without(params: Sequence[PyTree], shared: Mapping[str, str]) -> list[PyTree]:
    """Return the parameters of stages, None for those that another stage has."""
    return _mapped(lambda path, leaf: None if path in shared else leaf, params)


def homes_of(tree: PyTree, params: Sequence[PyTree]) -> list[int | None]:
    """Return the stage of each leaf: that of the parameter whose path ends its own.

    >>> homes_of({"count": 0, "mu": [{"w": 1.0}, {"w": 1.0}]}, [{"w": 1.0}] * 2)
    [None, 0, 1]
    """
    paths = sorted((path for path, _ in named_leaves(list(params))), key=len)

    def home(path: str) -> int | None:
        own = [each for each in paths if f"/{path}".endswith(f"/{each}")]
        return int(own[-1].partition("/")[0]) if own else None

    return [home(path) for path, _ in named_leaves(tree)]


def _is_none(node: Any) -> bool:
    return node is None


def _mapped(change: Any, params: Sequence[PyTree]) -> list[PyTree]:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: change(leaf_path(path), leaf), list(params), is_leaf=_is_none
    )
