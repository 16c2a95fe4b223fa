"""Walk through nested containers as Launchpad does: leaves, their paths, replacement.

A container is a list, a tuple (named ones too), a mapping, or an instance of an `attrs`
class. All else is a leaf, `None` and data classes included: arguments reach a
constructor unchanged, handles apart.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from replicator.base.types import PyTree

_DEEPEST = 64


def map_leaves(fn: Callable[[Any], Any], structure: PyTree) -> PyTree:
    """Return the structure with `fn(leaf)` for each leaf; containers keep their type.

    Raises:
      ValueError: It is nested more than 64 deep, or holds itself.

    >>> map_leaves(lambda x: 10 * x, {"a": [1, (2,)]})
    {'a': [10, (20,)]}
    """
    return _mapped(fn, structure, 0)


def leaves_with_paths(structure: PyTree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf with the Python expression that leads to it.

    Args:
      structure: Any nesting of containers.
      path: Path of the structure itself.

    Raises:
      ValueError: It is nested more than 64 deep, or holds itself.

    >>> list(leaves_with_paths({"a": [1, 2]}, "kwargs"))
    [("kwargs['a'][0]", 1), ("kwargs['a'][1]", 2)]
    """
    return _walk(structure, path, 0)


def children(structure: PyTree, path: str) -> list[tuple[str, Any]] | None:
    """Return the parts of a container with their paths; None for a leaf.

    >>> children({"a": 1, "b": [2]}, "kwargs")
    [("kwargs['a']", 1), ("kwargs['b']", [2])]
    >>> children(3, "args[0]") is None
    True
    """
    if isinstance(structure, Mapping):
        return [(f"{path}[{key!r}]", part) for key, part in structure.items()]
    names = _field_names(structure)
    if names is not None:
        return [(f"{path}.{name}", getattr(structure, name)) for name in names]
    if isinstance(structure, list | tuple):
        return [(f"{path}[{index}]", part) for index, part in enumerate(structure)]
    return None


def _walk(structure: PyTree, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    parts = children(structure, path)
    if parts is None:
        yield path, structure
        return
    _check_depth(depth)
    for part_path, part in parts:
        yield from _walk(part, part_path, depth + 1)


def _mapped(fn: Callable[[Any], Any], structure: PyTree, depth: int) -> PyTree:
    parts = children(structure, "")
    if parts is None:
        return fn(structure)
    _check_depth(depth)
    return _rebuilt(structure, [_mapped(fn, part, depth + 1) for _, part in parts])


def _rebuilt(structure: PyTree, parts: Sequence[Any]) -> PyTree:
    cls: Any = type(structure)
    if isinstance(structure, Mapping):
        items = list(zip(structure, parts, strict=True))
        if isinstance(structure, collections.defaultdict):
            return cls(structure.default_factory, items)
        # A read-only view, for instance, cannot be made of items.
        return cls(items) if isinstance(structure, dict) else dict(items)
    names = _field_names(structure)
    if names is None:
        return cls(parts)
    if isinstance(structure, tuple):
        return cls(*parts)
    # `attrs` drops the underscore of a private field in its constructor.
    keywords = [name.lstrip("_") for name in names]
    return cls(**dict(zip(keywords, parts, strict=True)))


def _field_names(structure: PyTree) -> Sequence[str] | None:
    """Return the fields of a named tuple or an `attrs` instance."""
    if isinstance(structure, tuple):
        return getattr(structure, "_fields", None)
    fields = getattr(type(structure), "__attrs_attrs__", None)
    return None if fields is None else [field.name for field in fields]


def _check_depth(depth: int) -> None:
    if depth >= _DEEPEST:
        raise ValueError(
            f"Arguments must be nested at most {_DEEPEST} deep, got more: does a "
            "container hold itself? Flatten them."
        )
