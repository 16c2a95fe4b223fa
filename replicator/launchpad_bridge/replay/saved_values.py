"""Values in files, as they would be sent: whole, checked, and never unpickled.

magic | CRC-32 of the rest | length of the head | head | arrays
"""

import struct
import zlib
from pathlib import Path

import jax

from replicator.base.types import PyTree
from replicator.checkpoint.disk import Disk
from replicator.errors import CheckpointError, EncodeError, RpcError
from replicator.launchpad_bridge.trajectories.table import TrajectoryError
from replicator.rpc.codec.codec import decode, encode
from replicator.rpc.codec.wire_format import lay_out

_START = struct.Struct("<8sIQ")
_MAGIC = b"replay 1"


def write_value(path: Path, value: PyTree, *, disk: Disk) -> None:
    """Write a value to a file, which is there whole, and durably, or not at all.

    >>> write_value(Path("a"), {"step": 3}, disk=Disk())
    >>> read_value(Path("a"))
    {'step': 3}
    """
    encoded = encode(value)
    parts: list[bytes | memoryview] = [encoded.head]
    end = 0
    # Not in one piece: making one would keep all other threads from running.
    offsets, _ = lay_out(encoded.buffers)
    for offset, buffer in zip(offsets, encoded.buffers, strict=True):
        parts += [bytes(offset - end), buffer]
        end = offset + len(buffer)
    crc32 = 0
    for part in parts:
        crc32 = zlib.crc32(part, crc32)
    start = _START.pack(_MAGIC, crc32, len(encoded.head))
    disk.replace_file(path, [start, *parts])


def read_value(path: Path) -> PyTree:
    """Return the value of a file that `write_value` wrote.

    Raises:
      CheckpointError: The file is missing, or not as it was written.
    """
    try:
        data = path.read_bytes()
        magic, crc32, head_bytes = _START.unpack_from(data)
        content = memoryview(data)[_START.size :]
        if magic != _MAGIC or zlib.crc32(content) != crc32:
            raise ValueError("its checksum is another")
        return decode(content[:head_bytes], content[head_bytes:])
    except (OSError, ValueError, struct.error, RpcError) as error:
        raise CheckpointError(
            f"`{path.name}` must be as it was written, got {error} in {path.parent}. "
            "Move that folder away: the table begins empty."
        ) from error


def check_savable(trajectories: PyTree, actor: str) -> None:
    """Raise a `TrajectoryError` if rows are of a class that no file can hold."""
    try:
        encode(jax.tree.map(lambda leaf: 0, trajectories))
    except EncodeError as error:
        raise TrajectoryError(
            f"`trajectories` of {actor} must be what `checkpoint_dir` can hold: {error}"
        ) from error
