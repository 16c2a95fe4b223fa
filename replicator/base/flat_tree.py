"""A pytree as a list of leaves, passed from step to step without building the tree.

JAX flattens the arguments of a program and builds its results. For nodes that do so in
Python, such as NNX modules, that takes longer than all other work of the host in a
step: 2 ms of processor time for a ResNet-18. The tree is rarely read between two steps;
so a loop keeps the leaves, and builds the tree on request.
"""

from typing import Any

import jax

from replicator.base.types import PyTree


@jax.tree_util.register_pytree_node_class
class FlatTree:
    """The leaves of a tree, in order, and its structure.

    Attributes:
      leaves: Arrays.
      structure: The `PyTreeDef` of the tree.
    """

    __slots__ = ("__weakref__", "_tree", "leaves", "structure")

    def __init__(self, leaves: list[Any], structure: Any) -> None:
        self.leaves = leaves
        self.structure = structure
        self._tree: PyTree = None

    @classmethod
    def of(cls, tree: PyTree) -> "FlatTree":
        """Flatten a tree; a `FlatTree` is returned as it is.

        >>> FlatTree.of({"a": 0, "b": 1}).leaves
        [0, 1]
        """
        return tree if isinstance(tree, FlatTree) else cls(*jax.tree.flatten(tree))

    @property
    def tree(self) -> PyTree:
        """The tree itself, built on first use."""
        if self._tree is None:
            self._tree = self.structure.unflatten(self.leaves)
        return self._tree

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """Return the leaves and the structure, for JAX."""
        return self.leaves, self.structure

    @classmethod
    def tree_unflatten(cls, structure: Any, leaves: Any) -> "FlatTree":
        """Build one from the results of `tree_flatten`, for JAX."""
        return cls(list(leaves), structure)


def whole(tree: PyTree) -> PyTree:
    """Return the tree of a `FlatTree`; any other tree as it is.

    >>> whole(FlatTree.of({"a": 0}))
    {'a': 0}
    """
    return tree.tree if isinstance(tree, FlatTree) else tree
