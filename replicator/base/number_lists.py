"""Lists of Python numbers, as Hugging Face datasets give them, as arrays."""

from typing import Any

import jax
import numpy as np

from replicator.base.trees import leaf_path
from replicator.base.types import PyTree
from replicator.errors import BatchError

NUMBER = (bool, int, float, complex)
"""Types of Python numbers."""


def lists_as_arrays(batch: PyTree, *, name: str, where: str = "") -> PyTree:
    """Return `batch` with each list, or list of lists, of Python numbers as an array.

    Hugging Face datasets give rows so. A list that holds an array stays a container.

    >>> lists_as_arrays({"ids": [[1, 2], [3, 4]]}, name="batch")["ids"].shape
    (2, 2)

    Args:
      batch: Batch of the user.
      name: Name of the argument that holds it, for errors.
      where: Its place likewise: "batch 3".

    Raises:
      BatchError: Lists at one depth differ in length, or an item is None.
    """
    if not any(isinstance(leaf, NUMBER) for leaf in jax.tree.leaves(batch)):
        return batch  # at once: most batches hold arrays

    def array(path: tuple, node: Any) -> Any:
        if not _is_list_of_numbers(node):
            return node
        found = _unevenness(node)
        if found is None:
            return np.asarray(node)
        raise BatchError(
            f"`{name}` must hold lists of equal lengths, got {found} for "
            f"`{leaf_path(path) or 'all'}`{f' ({where})' if where else ''}. Pad them, "
            "or cut them, to one length."
        )

    return jax.tree_util.tree_map_with_path(array, batch, is_leaf=_is_list_of_numbers)


def _is_list_of_numbers(node: Any) -> bool:
    """Return whether a list holds numbers, in lists or not, and nothing else."""
    if type(node) is not list:
        return False
    leaves = jax.tree.leaves(node, is_leaf=lambda each: type(each) is not list)
    numbers = [isinstance(leaf, NUMBER) for leaf in leaves if leaf is not None]
    return bool(numbers) and all(numbers)


def _unevenness(node: list) -> str | None:
    """Describe how lists of one depth differ; None if they do not."""
    while True:
        if None in node:
            return "None in the place of a number"
        lists = [each for each in node if type(each) is list]
        if not lists:
            return None
        if len(lists) < len(node):
            return "numbers beside lists"
        lengths = sorted({len(each) for each in lists})
        if len(lengths) > 1:
            return f"{lengths[0]} and {lengths[-1]} numbers"
        node = [number for each in lists for number in each]
