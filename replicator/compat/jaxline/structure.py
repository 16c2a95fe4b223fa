"""Write the containers around arrays as plain JSON, and build them again.

A checkpoint of ours holds arrays by name, and nothing that could be executed. An
experiment, on the other hand, may leave its attributes None until its first step: then
nothing but the checkpoint knows that an optimizer's state is made of named tuples. A
named tuple is found again by its name, among the modules that the program has already
imported; nothing is imported because a file says so. Other containers of JAX (a flax
`TrainState`) are taken from the experiment, which has to make them in `__init__`.
"""

import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from replicator.base.types import PyTree
from replicator.errors import CheckpointMismatchError

_PLAIN = (bool, int, str)


def describe_structure(tree: Any) -> tuple[Any, dict[str, Any]]:
    """Take a tree apart.

    Args:
      tree: Dicts, lists, tuples, named tuples, None, numbers, strings, arrays, and
        other containers that JAX knows.

    Returns:
      Its structure in plain JSON, with numbers and strings in it; and its arrays, in
      nested dicts.
    """
    if tree is None or type(tree) in _PLAIN:
        return {"is": "plain", "value": tree}, {}
    if type(tree) is float:
        return {"is": "float", "value": tree.hex()}, {}
    if isinstance(tree, jax.Array):
        return {"is": "jax"}, {"array": tree}
    if isinstance(tree, np.ndarray | np.generic):
        return {"is": "numpy"}, {"array": tree}
    if type(tree) is dict and all(type(key) in (str, int) for key in tree):
        return _describe_items({"is": "dict"}, list(tree.items()))
    if type(tree) in (list, tuple):
        return _describe_items({"is": type(tree).__name__}, list(enumerate(tree)))
    if _is_named_tuple(type(tree)):
        what = {"is": "named tuple", "class": _class_name(type(tree))}
        return _describe_items(what, list(_parts(tree).items()))
    leaves = jax.tree.leaves(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        return {"is": "numpy"}, {"array": tree}  # refused, by name, when it is saved
    what = {"is": "other", "class": _class_name(type(tree))}
    return _describe_items(what, list(enumerate(leaves)))


def build(structure: Any, arrays: Mapping[str, Any], like: PyTree, name: str) -> PyTree:
    """Put a tree together again.

    Args:
      structure: From `describe_structure`.
      arrays: Likewise; NumPy arrays.
      like: What the experiment has now; asked for containers that are not known.
      name: Of the tree, for errors.

    Raises:
      CheckpointMismatchError: A class of containers is not there.
    """
    kind = structure["is"]
    if kind == "plain":
        return structure["value"]
    if kind == "float":
        return float.fromhex(structure["value"])
    if kind == "numpy":
        return arrays["array"]
    if kind == "jax":
        return jax.numpy.asarray(arrays["array"])
    return _build_container(structure, arrays, like, name)


def _build_container(
    structure: Any, arrays: Mapping[str, Any], like: PyTree, name: str
) -> PyTree:
    kind, known = structure["is"], structure.get("class", structure["is"])
    if kind == "other":
        return _fill(like, _children(structure, arrays, {}, name), known, name)
    current = _parts(like) if type(like) is _class_of(structure, name) else {}
    items = _children(structure, arrays, current, name)
    if kind == "dict":
        return items
    if kind == "named tuple":
        return _class_of(structure, name)(**items)
    return _class_of(structure, name)(items.values())


def _describe_items(
    what: dict[str, Any], items: list[tuple[Any, Any]]
) -> tuple[Any, dict[str, Any]]:
    parts = [(key, *describe_structure(child)) for key, child in items]
    structure = what | {"items": [[key, below] for key, below, _ in parts]}
    return structure, {str(key): arrays for key, _, arrays in parts if arrays}


def _children(
    structure: Any, arrays: Mapping[str, Any], current: Mapping[Any, Any], name: str
) -> dict[Any, Any]:
    return {
        key: build(below, arrays.get(str(key), {}), current.get(key), f"{name}/{key}")
        for key, below in structure["items"]
    }


def _parts(tree: Any) -> dict[Any, Any]:
    if isinstance(tree, dict):
        return tree
    return dict(zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True))


def _fill(like: PyTree, leaves: dict[Any, Any], known: str, name: str) -> PyTree:
    """Put leaves into a container that the experiment has."""
    found = _class_name(type(like))
    if found != known or len(jax.tree.leaves(like)) != len(leaves):
        raise CheckpointMismatchError(
            f"`{name}` must be the `{known}` of {len(leaves)} leaves that was saved, "
            f"got {found}. Make it in the experiment's `__init__`."
        )
    return jax.tree.unflatten(jax.tree.structure(like), list(leaves.values()))


def _class_of(structure: Any, name: str) -> Any:
    builtin = {"dict": dict, "list": list, "tuple": tuple}.get(structure["is"])
    if builtin is not None:
        return builtin
    module, _, qualified = structure["class"].partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not _is_named_tuple(found):
        raise CheckpointMismatchError(
            f"`{name}` must be a `{structure['class']}`, as it was saved, got no named "
            "tuple of that name. Use the versions that it was saved with."
        )
    return found


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _is_named_tuple(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")
