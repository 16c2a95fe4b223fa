"""The manifest: one JSON file that describes a checkpoint and lists its content.

The file holds its own checksum, and is valid only if writing it again gives the same
bytes: no flipped bit can pass, not even in white space.
"""

import dataclasses
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replicator.base.host.strict_json import strict_json
from replicator.checkpoint.checksums import FileRecord, first_damage
from replicator.checkpoint.pieces.plan import SmallPiece, StoredArray, StoredLeaf
from replicator.errors import CheckpointError, CheckpointMismatchError

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state"
"""Folder of the arrays in format 1; from format 2 on its name is random."""

_FORMAT = 2
_NEW_IN_2 = ("state", "stored", "arrays", "writers")


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
      files: All files but this one.
      state: Folder of the arrays.
      stored: For each leaf, the place of its bytes; not there in format 1.
      arrays: Arrays that hold the leaves; not there in format 1.
      writers: Number of processes that wrote the arrays.
      format: Number of the format.
    """

    step: int
    generation: int
    meta: Mapping[str, Any]
    metrics: Mapping[str, float]
    num_devices: int
    leaves: tuple[LeafRecord, ...]
    files: tuple[FileRecord, ...] = ()
    state: str = STATE_NAME
    stored: tuple[StoredLeaf, ...] = ()
    arrays: tuple[StoredArray, ...] = ()
    writers: int = 1
    format: int = _FORMAT


def encode(manifest: Manifest) -> bytes:
    """Return a manifest with its checksum as JSON.

    >>> empty = {"meta": {}, "metrics": {}, "leaves": ()}
    >>> manifest = Manifest(step=7, generation=1, num_devices=8, **empty)
    >>> decode(encode(manifest)) == manifest
    True
    """
    body = {"format": manifest.format, **_fields(manifest)}
    body["stored"] = [
        _fields(leaf) | {"small": [_fields(piece) for piece in leaf.small]}
        for leaf in manifest.stored
    ]
    for name in ("leaves", "files", "arrays"):
        body[name] = [_fields(record) for record in getattr(manifest, name)]
    if manifest.format == 1:
        body = {name: body[name] for name in body if name not in _NEW_IN_2}
    text = strict_json(body)
    if manifest.format > 1:  # in one line: with thousands of leaves, ten times as fast
        return f'{{"manifest": {text}, "crc32": {_crc32(text)}}}\n'.encode()
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
    if body["format"] not in (1, _FORMAT):
        raise ValueError("it has a format that this version does not know")
    body["leaves"] = tuple(_record(LeafRecord, **leaf) for leaf in body["leaves"])
    body["files"] = tuple(FileRecord(**file) for file in body["files"])
    body["stored"] = tuple(_stored(**leaf) for leaf in body.get("stored", ()))
    body["arrays"] = tuple(
        _record(StoredArray, **array) for array in body.get("arrays", ())
    )
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
    return decode_at(path, path.read_bytes)


def decode_at(place: object, read: Callable[[], bytes]) -> Manifest:
    """Read a manifest whose place stands in errors.

    >>> decode_at("a/manifest.json", lambda: b"{}")
    Traceback (most recent call last):
    replicator.errors.CheckpointError: `a/manifest.json` must be the manifest of ...

    Raises:
      CheckpointError: There is none, or it is damaged.
      CheckpointMismatchError: It is of a newer format.
    """
    try:
        return decode(read())
    except CheckpointMismatchError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:
        raise CheckpointError(
            f"`{place}` must be the manifest of a checkpoint, got {failure}. "
            "Restore an earlier step."
        ) from failure


def verify(checkpoint: Path, manifest: Manifest) -> None:
    """Compare all files of a checkpoint with its manifest.

    Raises:
      CheckpointError: A file is damaged; the error names it.
    """
    _require_undamaged(checkpoint, manifest, is_read=bool)


def verify_names(checkpoint: Path, manifest: Manifest) -> None:
    """Compare the files of a checkpoint with its manifest, before it is restored.

    Shards are not read: TensorStore verifies the checksums of what it reads of them.

    Raises:
      CheckpointError: A file is damaged; the error names it.
    """
    _require_undamaged(
        checkpoint,
        manifest,
        is_read=lambda path: is_metadata(manifest, path),
    )


def is_metadata(manifest: Manifest, path: str) -> bool:
    """Return whether a file's checksum is compared before the arrays are read.

    TensorStore verifies the checksums of the shards that it reads.
    """
    return manifest.format == 1 or path.endswith(".json")


def _require_undamaged(
    checkpoint: Path, manifest: Manifest, *, is_read: Callable[[str], bool]
) -> None:
    damage = first_damage(
        manifest.files, checkpoint / manifest.state, root=checkpoint, is_read=is_read
    )
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


def _stored(*, small: list[dict[str, Any]], **fields: Any) -> StoredLeaf:
    pieces = tuple(_record(SmallPiece, **piece) for piece in small)
    return _record(StoredLeaf, small=pieces, **fields)


def _record(kind: Callable[..., Any], **fields: Any) -> Any:
    """Return a record whose lists are tuples, as they were before JSON."""
    return kind(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
    )
