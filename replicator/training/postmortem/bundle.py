"""Write and read a post-mortem bundle: a directory that is whole or absent.

    <run>/postmortem/<step>/
      about.json     error, step, versions, configuration, names and dtypes of arrays
      arrays.npz     state and batch, as plain arrays
      program.txt    the jaxpr of the step, as one replica runs it
      program.bin    the same as serialized StableHLO, if it could be exported

Nothing in it is pickled, and reading refuses pickles: a bundle may come from anywhere.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.host.paths import expanded, sync
from replicator.base.host.strict_json import strict_json
from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.errors import ArgumentError

FOLDER = "postmortem"
_FORMAT = 1
_ABOUT, _ARRAYS, _TEXT, _BINARY = (
    "about.json",
    "arrays.npz",
    "program.txt",
    "program.bin",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """Record of a step that failed.

    Attributes:
      step: Number of the step, from 1.
      error: Its `type`, its `message`, its `traceback`.
      state: The arrays of the state before the step, by path; None if it was lost.
      batch: The arrays of the global batch, by path; None if it was lost.
      jaxpr: The program as text; None if it could not be traced.
      exported: The program as serialized StableHLO; None if it could not be exported.
      about: Other plain values: configuration, versions, positions.
    """

    step: int
    error: Mapping[str, str]
    state: Mapping[str, np.ndarray] | None = None
    batch: Mapping[str, np.ndarray] | None = None
    jaxpr: str | None = None
    exported: bytes | None = None
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def updates_per_call(self) -> int:
        """Number of updates per call of its step; 1 where it does not hold a number."""
        match self.about:
            case {"steps_per_call": int(count)}:
                return count
        return 1


def arrays_of(tree: PyTree) -> dict[str, np.ndarray]:
    """Return the leaves of a tree, on the host, by path.

    >>> arrays_of({"params": {"w": jnp.ones(2)}})
    {'params/w': array([1., 1.], dtype=float32)}
    """
    return {path: np.asarray(_plain(leaf)) for path, leaf in named_leaves(tree)}


def hash_of(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bits.

    >>> one, other = ({"w": np.ones(2)}, {"w": np.ones(2)})
    >>> hash_of(one) == hash_of(other)
    True
    """
    digest = hashlib.sha256()
    for path, array in arrays.items():
        digest.update(f"{path} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def write_bundle(run_directory: str | os.PathLike[str], bundle: Bundle) -> Path:
    """Write a bundle to `postmortem/<step>` of a run's directory.

    Args:
      run_directory: Directory of the run, made if absent. A bundle of the same step is
        replaced.
      bundle: The bundle.

    Returns:
      The bundle's directory.

    Raises:
      OSError: It cannot be written; then nothing of it is there.
    """
    folder = Path(run_directory) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{bundle.step}.{os.getpid()}.draft"
    target = folder / str(bundle.step)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        _write_files(draft, bundle)
        # Death between these two leaves only the draft: whole, but not under its name.
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


def read_bundle(directory: str | os.PathLike[str]) -> Bundle:
    """Read a bundle.

    Args:
      directory: Directory of the bundle.

    Raises:
      ArgumentError: There is no bundle, or it is damaged.
    """
    root = expanded(directory)
    if not (root / _ABOUT).is_file():
        raise ArgumentError(
            f"`directory` must be a post-mortem bundle, got {root} without `{_ABOUT}`. "
            f"Look into `{FOLDER}/` of the run's directory."
        )
    try:
        about = json.loads((root / _ABOUT).read_text(encoding="utf-8"))
        if about["format"] != _FORMAT:
            raise ValueError(f"format {about['format']} is not {_FORMAT}")
        groups = _read_arrays(root / _ARRAYS, about["arrays"])
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as failure:
        raise ArgumentError(
            f"`directory` must be a whole bundle, got {root}, which is damaged: "
            f"{failure!r}. Copy it again from where the run was."
        ) from failure
    return Bundle(
        step=about["step"],
        error=about["error"],
        state=groups.get("state"),
        batch=groups.get("batch"),
        jaxpr=_read_text(root / _TEXT),
        exported=_read_bytes(root / _BINARY),
        about=about["about"],
    )


def _plain(leaf: Any) -> Any:
    """Return the data of a random key: NumPy has no keys."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _write_files(folder: Path, bundle: Bundle) -> None:
    groups = {"state": bundle.state, "batch": bundle.batch}
    listed, stored = {}, {}
    for group, arrays in groups.items():
        if arrays is None:
            continue
        listed[group] = []
        for number, (path, array) in enumerate(arrays.items()):
            entry = {"path": path, "dtype": str(array.dtype), "shape": array.shape}
            listed[group].append(entry)
            stored[f"{group}_{number}"] = _bytes_of(array)
    np.savez(folder / _ARRAYS, **stored)
    if bundle.jaxpr is not None:
        (folder / _TEXT).write_text(bundle.jaxpr, encoding="utf-8")
    if bundle.exported is not None:
        (folder / _BINARY).write_bytes(bundle.exported)
    about = {
        "format": _FORMAT,
        "step": bundle.step,
        "error": bundle.error,
        "state_sha256": None if bundle.state is None else hash_of(bundle.state),
        "arrays": listed,
        "about": bundle.about,
    }
    (folder / _ABOUT).write_text(strict_json(about, indent=2) + "\n", encoding="utf-8")
    for path in sorted(folder.iterdir()):
        sync(path)
    sync(folder)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    # NumPy would write an unknown dtype (bfloat16) as nameless memory.
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def _read_arrays(path: Path, listed: Mapping[str, Any]) -> dict[str, dict]:
    # NumPy leaves a file open that it cannot read.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        return {
            group: {
                entry["path"]: np.frombuffer(
                    stored[f"{group}_{number}"].tobytes(), jnp.dtype(entry["dtype"])
                ).reshape(entry["shape"])
                for number, entry in enumerate(entries)
            }
            for group, entries in listed.items()
        }


def _read_text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _read_bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
