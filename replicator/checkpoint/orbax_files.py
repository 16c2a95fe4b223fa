"""Write arrays as files, and read them back: the one module that uses orbax.

Any orbax reads these files (`PyTreeCheckpointer().restore(path)`). Arrays that orbax
cannot hold are written in another form, and the manifest has the real one:
- an empty array is left out: orbax refuses it;
- a `uint2` or `uint4`, which tensorstore does not know, becomes bytes.
Orbax finds its own files by a glob pattern that contains the path, and tensorstore
reads a backslash as a slash: paths that would be misread are replaced by a link.
"""

import contextlib
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from replicator.base.trees import nested
from replicator.checkpoint.manifest import LeafRecord
from replicator.errors import CheckpointError

_AS_BYTES = ("uint2", "uint4")
_MISREAD = re.compile(r"[*?\[\\\ud800-\udfff]")  # the last are not valid text


def write_arrays(
    path: Path, leaves: Sequence[LeafRecord], arrays: Sequence[np.ndarray]
) -> None:
    """Write arrays below a new directory.

    Only this process takes part, also if there are others.

    Args:
      path: Directory, which does not exist yet.
      leaves: Records of the arrays.
      arrays: Arrays in the same order; for random keys their data.

    Raises:
      OSError: An array could not be written, or is missing in the index.
    """
    tree = nested(
        (leaf.parts, array.view(np.uint8) if leaf.dtype in _AS_BYTES else array)
        for leaf, array in zip(leaves, arrays, strict=True)
        if array.size
    )
    orbax = require_orbax()
    with _quiet(), _checkpointer(orbax) as checkpointer, _alias(path) as alias:
        try:
            checkpointer.save(alias, args=orbax.args.PyTreeSave(tree))
            _require_listed(alias, [leaf for leaf in leaves if 0 not in leaf.shape])
        except ValueError as failure:
            raise OSError(_problem(failure)) from None


def read_arrays(path: Path, leaves: Sequence[LeafRecord]) -> list[np.ndarray]:
    """Read all arrays below a directory that `write_arrays` made.

    Args:
      path: The directory.
      leaves: Records of the arrays.

    Returns:
      The arrays in the order of `leaves`; for random keys their data.

    Raises:
      CheckpointError: Orbax cannot read them.
    """
    orbax = require_orbax()
    with _quiet(), _checkpointer(orbax) as checkpointer, _alias(path) as alias:
        try:
            tree = checkpointer.restore(alias, args=orbax.args.PyTreeRestore())
        except ValueError as failure:
            raise CheckpointError(
                f"`{path}` must be what orbax can read, got what it cannot: "
                f"{_problem(failure)} Restore an earlier step."
            ) from None
    return [_find(leaf, tree) for leaf in leaves]


def require_orbax() -> Any:
    """Return the module `orbax.checkpoint`; runs without checkpoints never load it."""
    import orbax.checkpoint

    return orbax.checkpoint


@contextlib.contextmanager
def _alias(path: Path) -> Iterator[Path]:
    """Yield a path that orbax reads correctly: `path`, or a link to it."""
    if not _MISREAD.search(str(path)):
        yield path
        return
    temporary = tempfile.gettempdir()
    place = "/tmp" if _MISREAD.search(temporary) else temporary
    with tempfile.TemporaryDirectory(prefix="replicator-", dir=place) as folder:
        link = Path(folder, "checkpoint")
        link.symlink_to(path.parent.absolute())
        yield link / path.name


def _require_listed(path: Path, leaves: Sequence[LeafRecord]) -> None:
    """Check that the index lists all leaves: arrays are found by it alone."""
    import tensorstore

    base = {"driver": "file", "path": f"{path}/"}
    index = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    listed = {key.decode() for key in index.list().result()}
    for leaf in leaves:
        if f"{'.'.join(leaf.parts)}/.zarray" not in listed:
            raise OSError(f"the index of `{path}` does not list `{leaf.path}`")


def _problem(failure: ValueError) -> str:
    """Return the error of tensorstore without the request in it."""
    return str(failure).partition(" [tensorstore_spec=")[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress orbax's 25 log lines per save, and 60 per failure."""
    log = logging.getLogger("absl")
    log.addFilter(_is_needed)
    try:
        yield
    finally:
        log.removeFilter(_is_needed)


def _is_needed(record: logging.LogRecord) -> bool:
    if "orbax" not in record.pathname:
        return True
    # An error in a thread of orbax is raised here, too: it is reported once.
    return record.levelno >= logging.WARNING and not record.exc_info


def _checkpointer(orbax: Any) -> Any:
    here = jax.process_index()
    alone = orbax.options.MultiprocessingOptions(
        primary_host=here,
        active_processes={here},
        barrier_sync_key_prefix=f"replicator_{here}",
    )
    # Trained weights do not compress; without compression a save takes 0.6 of the time.
    handler = orbax.PyTreeCheckpointHandler(
        use_compression=False, multiprocessing_options=alone
    )
    return orbax.Checkpointer(handler, multiprocessing_options=alone)


def _find(leaf: LeafRecord, tree: Mapping[str, Any]) -> np.ndarray:
    dtype = _dtype("uint32" if leaf.key_impl else leaf.dtype)
    if 0 in leaf.shape:
        return np.empty(leaf.shape, dtype)
    node: Any = tree
    for part in leaf.parts:
        node = node[part]
    array = np.asarray(node)
    return array.view(dtype) if leaf.dtype in _AS_BYTES else array


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))
