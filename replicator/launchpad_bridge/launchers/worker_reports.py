"""What a worker's process tells its launcher: that it returned, or what it raised.

Frames on a private socket: a kind, a length, the codec's bytes. A launcher reads them
like anything that another process sends: nothing is unpickled, nothing imported.
"""

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any, Literal

from replicator.errors import (
    DecodeError,
    EncodeError,
    MessageTooLargeError,
    RemoteError,
)
from replicator.protocols import PyTree
from replicator.rpc.codec import Encoded, decode, encode
from replicator.rpc.message_limits import MessageLimits
from replicator.rpc.registry import DEFAULT_REGISTRY
from replicator.rpc.remote_errors import Told, rebuild, tell
from replicator.rpc.wire_format import lay_out

STOP = b"s"
"""From the launcher: stop."""

_HEADER = struct.Struct("!cQQ")
_ASK, _RETURNED, _STOPPED, _RAISED = b"a", b"r", b"s", b"e"
_LIMITS = MessageLimits()
_MOST_NOTES = 16
_LONGEST_NOTE = 2048
_MOST_BYTES = _LIMITS.message_bytes + _LIMITS.head_bytes

ASK_PROGRAM_TO_STOP = _HEADER.pack(_ASK, 0, 0)
"""From the worker: the whole run shall stop."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unsendable:
    """In place of a result that cannot travel.

    Attributes:
      reason: What in it cannot, and why.
    """

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a worker said.

    Attributes:
      kind: "asked" for a stop of the run, "returned", "stopped" or "raised".
      result: What it returned, or an `Unsendable`.
      error: What it raised.
      log_bytes: How long its log was before the traceback.
      notes: What was added to the error.
    """

    kind: Literal["asked", "returned", "stopped", "raised"]
    result: PyTree = None
    error: Told | None = None
    log_bytes: int | None = None
    notes: Sequence[str] = ()


def pack_result(result: PyTree, *, stopped: bool) -> bytes:
    """Return a frame that says what a node returned."""
    try:
        encoded = encode((True, result), limits=_LIMITS)
    except (EncodeError, MessageTooLargeError) as error:
        encoded = encode((False, str(error)))
    return _pack(_STOPPED if stopped else _RETURNED, encoded)


def pack_error(error: BaseException, *, log_bytes: int) -> bytes:
    """Return a frame that says what a node raised."""
    told = tell(error, registry=DEFAULT_REGISTRY)
    notes = [str(note)[:_LONGEST_NOTE] for note in getattr(error, "__notes__", ())]
    rest = (log_bytes, notes[:_MOST_NOTES])
    try:
        return _pack(_RAISED, encode((tuple(told), *rest)))
    except (EncodeError, MessageTooLargeError):
        bare = told._replace(attributes=None)
        return _pack(_RAISED, encode((tuple(bare), *rest)))


def rebuild_error(told: Told, *, worker: str, where: str) -> RemoteError:
    """Return what a worker raised, as an error of this process.

    Args:
      told: What it said.
      worker: Its name.
      where: Its process.
    """
    return rebuild(
        told, method="run", server=worker, address=where, registry=DEFAULT_REGISTRY
    )


class ReportReader:
    """The frames of one worker."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def feed(self, data: bytes) -> list[Report]:
        """Take bytes as they arrive; return what is whole.

        Raises:
          DecodeError: It is no report.
        """
        self._begun += data
        reports = []
        while len(self._begun) >= _HEADER.size:
            kind, head_bytes, body_bytes = _HEADER.unpack_from(self._begun)
            start = _HEADER.size + head_bytes
            if head_bytes + body_bytes > _MOST_BYTES:
                raise DecodeError("A report must not be longer than a message.")
            if len(self._begun) < start + body_bytes:
                break
            with memoryview(self._begun) as view:
                head = bytes(view[_HEADER.size : start])
                body = bytes(view[start : start + body_bytes])
            del self._begun[: start + body_bytes]
            reports.append(_read(kind, head, body))
        return reports


def _pack(kind: bytes, encoded: Encoded) -> bytes:
    offsets, size = lay_out(encoded.buffers)
    body = bytearray(size)
    for offset, buffer in zip(offsets, encoded.buffers, strict=True):
        body[offset : offset + len(buffer)] = buffer
    return _HEADER.pack(kind, len(encoded.head), size) + encoded.head + body


def _read(kind: bytes, head: bytes, body: bytes) -> Report:
    if kind == _ASK:
        return Report(kind="asked")
    value = decode(head, body, limits=_LIMITS)
    match kind, value:
        case (b"e", (tuple() as told, int() as log_bytes, list() as notes)):
            return Report(
                kind="raised",
                error=_told(told),
                log_bytes=log_bytes,
                notes=[str(note) for note in notes],
            )
        case (b"r" | b"s", (bool() as sent, result)):
            return Report(
                kind="stopped" if kind == _STOPPED else "returned",
                result=result if sent else Unsendable(reason=str(result)),
            )
    raise DecodeError(f"A report must be of a known kind, got {kind!r}.")


def _told(values: tuple[Any, ...]) -> Told:
    match values:
        case (
            tuple() | list() as names,
            str() as text,
            str() as trace,
            None | int() as errno,
            None | dict() as attributes,
        ) if names and all(isinstance(name, str) for name in names):
            return Told(tuple(names), text, trace, errno, attributes)
    raise DecodeError("An error must be told by its types, its text, its traceback.")
