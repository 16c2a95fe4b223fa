"""A pytree as its leaves: what a loop hands from step to step without building it.

JAX flattens what a program takes and builds what it returns. For nodes that do so in
Python, as NNX modules do, that takes longer than all else the host does in a step: 2 ms
of processor time for a ResNet-18. Between two steps nobody looks, as a rule; so a loop
keeps the leaves, and builds the tree for who asks.
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
        """Take a tree apart; return it as it is if it is apart already."""
        return tree if isinstance(tree, FlatTree) else cls(*jax.tree.flatten(tree))

    @property
    def tree(self) -> PyTree:
        """The tree itself, built when it is asked for first."""
        if self._tree is None:
            self._tree = self.structure.unflatten(self.leaves)
        return self._tree

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """Return the leaves and what else there is, for JAX."""
        return self.leaves, self.structure

    @classmethod
    def tree_unflatten(cls, structure: Any, leaves: Any) -> "FlatTree":
        """Build one from what `tree_flatten` returned, for JAX."""
        return cls(list(leaves), structure)


def whole(tree: PyTree) -> PyTree:
    """Return a tree that may be flat as it is meant to be seen."""
    return tree.tree if isinstance(tree, FlatTree) else tree
