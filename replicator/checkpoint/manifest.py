"""The manifest: one JSON file that describes a checkpoint and lists its content.

The file holds its own checksum, and is valid only if writing it again gives the same
bytes: no flipped bit can pass, not even in white space.
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicator.base.host.strict_json import strict_json
from replicator.checkpoint.checksums import FileRecord, first_damage
from replicator.errors import CheckpointError, CheckpointMismatchError

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state"
_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeafRecord:
    """Path, dtype and shape of one leaf of the saved state.

    Attributes:
      parts: Path as names of keys, attributes and indices from the root on.
      dtype: Dtype as JAX writes it; `key<fry>` for random keys.
      shape: Saved shape; with a leading replica axis if `on_resize` is there.
      key_impl: Random number generator, if it is a typed key.
      on_resize: Choice of a declared `PerReplica` leaf.
    """

    parts: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    key_impl: str | None = None
    on_resize: str | None = None

    @property
    def path(self) -> str:
        """Path as text: `user/params/w`."""
        return "/".join(self.parts)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Description of a checkpoint, without its arrays.

    Attributes:
      step: Updates made.
      generation: Generation of the owner that wrote it.
      meta: Values of the caller, as plain JSON.
      metrics: Metrics by name; retention may rank by one of them.
      num_devices: Number of devices that held the state.
      leaves: Leaves in the order of the saved tree.
      files: Files that orbax wrote.
    """

    step: int
    generation: int
    meta: Mapping[str, Any]
    metrics: Mapping[str, float]
    num_devices: int
    leaves: tuple[LeafRecord, ...]
    files: tuple[FileRecord, ...] = ()


def encode(manifest: Manifest) -> bytes:
    """Return a manifest with its checksum as JSON.

    >>> empty = {"meta": {}, "metrics": {}, "leaves": ()}
    >>> manifest = Manifest(step=7, generation=1, num_devices=8, **empty)
    >>> decode(encode(manifest)) == manifest
    True
    """
    body = {"format": _FORMAT, **_fields(manifest)}
    body["leaves"] = [_fields(leaf) for leaf in manifest.leaves]
    body["files"] = [_fields(file) for file in manifest.files]
    text = strict_json(body)
    signed = {"manifest": json.loads(text), "crc32": _crc32(text)}
    return (json.dumps(signed, indent=1) + "\n").encode()


def decode(data: bytes) -> Manifest:
    """Read a manifest.

    >>> decode(b"{}")
    Traceback (most recent call last):
    KeyError: 'manifest'

    Raises:
      CheckpointMismatchError: The manifest is whole, and of a newer format.
      ValueError: These are not the bytes that `encode` wrote; depending on the damage
        also `KeyError`, `TypeError` or `AttributeError`.
    """
    signed = json.loads(data.decode())
    body = signed["manifest"]
    if body["format"] > _FORMAT and _crc32(strict_json(body)) == signed["crc32"]:
        raise CheckpointMismatchError(
            f"The checkpoint of step {body.get('step')} must have a format up to "
            f"{_FORMAT}, got {body['format']}, of a newer replicator. Upgrade "
            "`jax-replicator`; nothing was changed."
        )
    if body.pop("format") != _FORMAT:
        raise ValueError("it has a format that this version does not know")
    body["leaves"] = tuple(_leaf(**leaf) for leaf in body["leaves"])
    body["files"] = tuple(FileRecord(**file) for file in body["files"])
    # Strict JSON writes NaN and infinity as strings, which `float` reads.
    body["metrics"] = {name: float(value) for name, value in body["metrics"].items()}
    manifest = Manifest(**body)
    if encode(manifest) != data:
        raise ValueError("its content has changed")
    return manifest


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
      CheckpointError: There is none, or it is damaged.
      CheckpointMismatchError: It is of a newer format.
    """
    path = checkpoint / MANIFEST_NAME
    try:
        return decode(path.read_bytes())
    except CheckpointMismatchError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:
        raise CheckpointError(
            f"`{path}` must be the manifest of a checkpoint, got {failure}. "
            "Restore an earlier step."
        ) from failure


def verify(checkpoint: Path, manifest: Manifest) -> None:
    """Compare all files of a checkpoint with its manifest.

    Raises:
      CheckpointError: A file is damaged; the error names it.
    """
    damage = first_damage(manifest.files, checkpoint / STATE_NAME, root=checkpoint)
    if damage is not None:
        raise CheckpointError(
            f"`{checkpoint}` must be what was saved, got damage: {damage}. "
            "Restore an earlier step."
        )


def _crc32(text: str) -> int:
    return zlib.crc32(text.encode())


def _fields(record: Any) -> dict[str, Any]:
    # `dataclasses.asdict` would copy all values, half of the time of a scan.
    return {
        each.name: getattr(record, each.name) for each in dataclasses.fields(record)
    }


def _leaf(*, parts: list[str], shape: list[int], **fields: Any) -> LeafRecord:
    return LeafRecord(parts=tuple(parts), shape=tuple(shape), **fields)
