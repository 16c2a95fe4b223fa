"""The name `jax` for code of the days of `pmap`, with the functions that are gone.

    from replicator.compat import jax      # was: import jax

All other names are those of the real `jax`; `import jax.numpy as jnp` stays.
"""

from typing import Any

import jax as _jax

from replicator.compat.pmap import pmap
from replicator.compat.replicas import device_put_replicated, device_put_sharded

__all__ = [
    "device_put_replicated",
    "device_put_sharded",
    "host_count",
    "host_id",
    "pmap",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_multimap",
    "tree_structure",
    "tree_transpose",
    "tree_unflatten",
]

tree_flatten = _jax.tree_util.tree_flatten
tree_leaves = _jax.tree_util.tree_leaves
tree_map = tree_multimap = _jax.tree_util.tree_map
tree_structure = _jax.tree_util.tree_structure
tree_transpose = _jax.tree_util.tree_transpose
tree_unflatten = _jax.tree_util.tree_unflatten
host_count = _jax.process_count
host_id = _jax.process_index


def __getattr__(name: str) -> Any:
    return getattr(_jax, name)
