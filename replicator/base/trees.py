"""Pytree verbs that JAX lacks: leaf names, and how two trees differ."""

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.types import PyTree


def leaf_path(path: tuple) -> str:
    """Return a key path as text: `params/dense/kernel`.

    >>> [leaf_path(path) for path, _ in jax.tree.leaves_with_path({"a": [0, 1]})]
    ['a/0', 'a/1']
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(
    tree: PyTree, *, is_leaf: Callable[[PyTree], bool] | None = None
) -> list[tuple[str, PyTree]]:
    """List the leaves of `tree` as (path, leaf), in JAX's order.

    >>> named_leaves({"a": [0, 1]})
    [('a/0', 0), ('a/1', 1)]
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(leaf_path(path), leaf) for path, leaf in flat]


def nested(leaves: Iterable[tuple[Sequence[str], PyTree]]) -> dict[str, PyTree]:
    """Return leaves, each given with the names of its path, as nested dicts.

    >>> nested([(("a", "x"), 0), (("a", "y"), 1)])
    {'a': {'x': 0, 'y': 1}}
    """
    tree: dict[str, PyTree] = {}
    for (*folders, name), leaf in leaves:
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def describe(leaf: PyTree) -> str:
    """Return the dtype and shape of an array as text.

    >>> describe(np.zeros((8, 28), np.float32))
    'float32[8,28]'
    """
    shape = ",".join(str(size) for size in np.shape(leaf))
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    if dtype == jax.dtypes.float0:  # of the gradient of an integer
        dtype = "float0"
    return f"{dtype}[{shape}]"


def first_without_numbers(tree: PyTree) -> str | None:
    """Describe the first leaf of `tree` that JAX cannot turn into an array.

    >>> first_without_numbers({"name": "resnet", "step": 3})
    'a `str` at `name`'

    Returns:
      A text, or None if there is none.
    """
    for path, leaf in named_leaves(tree):
        if not _is_numbers(leaf):
            return f"a `{type(leaf).__name__}`" + (f" at `{path}`" if path else "")
    return None


def first_difference(expected: PyTree, found: PyTree) -> str | None:
    """Describe the first difference of two trees in structure, shape or dtype.

    >>> first_difference({"count": 0, "w": 0.0}, {"w": 0.0})
    '`count` is missing'

    Args:
      expected: Expected tree; arrays or `jax.ShapeDtypeStruct`s.
      found: Tree to compare.

    Returns:
      A text, or None if they agree.
    """
    want, have = dict(named_leaves(expected)), dict(named_leaves(found))
    for path in want:
        if path not in have:
            return f"`{path}` is missing"
    for path, leaf in have.items():
        if path not in want:
            return f"`{path}` is new"
        if describe(want[path]) != describe(leaf):
            return f"`{path}` is {describe(leaf)} instead of {describe(want[path])}"
    return _other_container(expected, found)


def _other_container(expected: PyTree, found: PyTree, path: tuple = ()) -> str | None:
    """Describe where two trees with the same leaves differ in a container's type."""
    (want, one), (have, other) = (
        jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda node, tree=tree: node is not tree
        )
        for tree in (expected, found)
    )
    if one != other and isinstance(expected, dict) and isinstance(found, dict):
        below = "/".join(filter(None, [leaf_path(path), ""]))
        for key in expected.keys() ^ found.keys():
            how = "missing" if key in expected else "new"
            return f"`{below}{key}` is {how}"
    if one != other:
        return f"`{leaf_path(path) or 'all'}` is {other} instead of {one}"
    below = (
        _other_container(child, beside, (*path, *key))
        for (key, child), (_, beside) in zip(want, have, strict=True)
        if child is not expected  # a leaf
    )
    return next(filter(None, below), None)


def _is_numbers(leaf: PyTree) -> bool:
    if isinstance(leaf, jax.Array | int | float):
        return True
    if isinstance(leaf, str | bytes):  # JAX may read a string as the name of a dtype
        return False
    try:
        jnp.asarray(leaf)
    except (TypeError, ValueError):
        return False
    return True
