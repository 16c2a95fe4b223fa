"""What a worker's process tells its launcher: that it returned, or what it raised.

Frames on a private socket: a kind, lengths, the codec's bytes. A launcher reads them
like anything that another process sends: nothing is unpickled, nothing imported.
"""

import dataclasses
import struct
from typing import Any, Literal, NamedTuple, TypeAlias

from replicator.base.types import PyTree
from replicator.errors import (
    DecodeError,
    EncodeError,
    MessageTooLargeError,
    RemoteError,
)
from replicator.launchpad_bridge.running.results import Unsendable
from replicator.rpc.answers import RAISED
from replicator.rpc.arrivals import checked
from replicator.rpc.codec.codec import Encoded, decode, encode
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import DEFAULT_REGISTRY
from replicator.rpc.codec.wire_format import lay_out
from replicator.rpc.protocols import MessageKind
from replicator.rpc.remote_errors import ErrorInfo, describe_error, remote_error

STOP = b"s"
"""From the launcher: stop."""

GoodEnd: TypeAlias = Literal["returned", "stopped", "preempted"]
"""How a node that did not raise came to its end; `Exited` says what each means."""

_HEADER = struct.Struct("!cQQQ")
_RAISED = b"e"
_ASKS: dict[bytes, Literal["run", "unit"]] = {b"a": "run", b"u": "unit"}
_ENDS: dict[GoodEnd, bytes] = {"returned": b"r", "stopped": b"s", "preempted": b"p"}
_END_OF: dict[bytes, GoodEnd] = {kind: end for end, kind in _ENDS.items()}
_LIMITS = MessageLimits()
_MOST_BYTES = _LIMITS.message_bytes + _LIMITS.head_bytes
_MOST_NOTES = 16
_LONGEST_NOTE = 2048

ASK_PROGRAM_TO_STOP = _HEADER.pack(b"a", 0, 0, 0)
"""From the worker: the whole run shall stop."""

ASK_UNIT_TO_STOP = _HEADER.pack(b"u", 0, 0, 0)
"""From the worker: it is preempted, and so are the others of its unit."""


class Frame(NamedTuple):
    """What a worker said, as it came.

    Attributes:
      kind: One byte.
      log_bytes: How long its log was before its traceback, if it raised.
      head: Of the value, as the codec made it.
      body: The value's arrays.
    """

    kind: bytes
    log_bytes: int
    head: bytes
    body: bytes

    @property
    def asks(self) -> Literal["run", "unit"] | None:
        """Who is to stop; None where it says how the worker ended."""
        return _ASKS.get(self.kind)

    @property
    def raised(self) -> bool:
        """Whether it tells an error."""
        return self.kind == _RAISED


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a worker said of its end.

    Attributes:
      kind: "raised", or how it ended well.
      result: What it returned, or an `Unsendable`.
      error: What it raised.
      notes: What was added to the error.
    """

    kind: GoodEnd | Literal["raised"]
    result: PyTree = None
    error: ErrorInfo | None = None
    notes: tuple[str, ...] = ()


def pack_result(result: PyTree, end: GoodEnd) -> bytes:
    """Return a frame that says what a node returned."""
    try:
        if isinstance(result, Unsendable):  # by a process that this one had started
            raise EncodeError(result.reason)
        encoded = encode((True, result), limits=_LIMITS)
    except (EncodeError, MessageTooLargeError) as error:
        encoded = encode((False, str(error)))
    return _pack_value(_ENDS[end], encoded)


def pack_error(error: BaseException, *, log_bytes: int) -> bytes:
    """Return a frame that says what a node raised."""
    told = describe_error(error, registry=DEFAULT_REGISTRY)
    notes = [str(note)[:_LONGEST_NOTE] for note in getattr(error, "__notes__", ())]
    notes = notes[:_MOST_NOTES]
    try:
        encoded = encode((tuple(told), notes))
    except (EncodeError, MessageTooLargeError):
        encoded = encode((tuple(told._replace(attributes=None)), notes))
    return _pack_value(_RAISED, encoded, log_bytes)


def rebuild_error(told: ErrorInfo, *, worker: str, where: str) -> RemoteError:
    """Return what a worker raised, as an error of this process.

    Args:
      told: What it said.
      worker: Its name.
      where: Its process.
    """
    return remote_error(
        told, method="run", server=worker, address=where, registry=DEFAULT_REGISTRY
    )


def pack(
    kind: bytes, head: bytes, body: bytes | bytearray = b"", log_bytes: int = 0
) -> bytes:
    """Return the bytes of one frame."""
    return _HEADER.pack(kind, log_bytes, len(head), len(body)) + head + body


class FrameReader:
    """The frames of one worker."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes as they arrive; return what is whole.

        Raises:
          DecodeError: It is longer than a report may be.
        """
        self._begun += data
        frames = []
        while len(self._begun) >= _HEADER.size:
            kind, log_bytes, head_bytes, body_bytes = _HEADER.unpack_from(self._begun)
            start = _HEADER.size + head_bytes
            if head_bytes + body_bytes > _MOST_BYTES:
                raise DecodeError("A report must not be longer than a message.")
            if len(self._begun) < start + body_bytes:
                break
            with memoryview(self._begun) as view:
                head = bytes(view[_HEADER.size : start])
                body = bytes(view[start : start + body_bytes])
            del self._begun[: start + body_bytes]
            frames.append(Frame(kind, log_bytes, head, body))
        return frames


def read_report(frame: Frame) -> Report:
    """Return what a frame says.

    Raises:
      DecodeError: It is no report.
      MessageTooLargeError: It is past a limit.
    """
    kind = frame.kind
    value = decode(frame.head, frame.body, limits=_LIMITS)
    match kind, value:
        case (b"e", (tuple() as told, list() as notes)):
            return Report(
                kind="raised",
                error=_told(told),
                notes=tuple(str(note) for note in notes),
            )
        case (_, (bool() as sent, result)) if kind in _END_OF:
            return Report(
                kind=_END_OF[kind],
                result=result if sent else Unsendable(reason=str(result)),
            )
    raise DecodeError(f"A report must be of a known kind, got {kind!r}.")


def _told(values: tuple[Any, ...]) -> ErrorInfo:
    match values:
        case (
            tuple() | list() as names,
            str() as text,
            str() as trace,
            None | int() as errno,
            None | dict() as attributes,
        ) if names:
            checked(MessageKind.ERROR, (RAISED, *values))
            return ErrorInfo(tuple(names), text, trace, errno, attributes)
    raise DecodeError("An error must be told by its types, its text, its traceback.")


def _pack_value(kind: bytes, encoded: Encoded, log_bytes: int = 0) -> bytes:
    offsets, size = lay_out(encoded.buffers)
    body = bytearray(size)
    for offset, buffer in zip(offsets, encoded.buffers, strict=True):
        body[offset : offset + len(buffer)] = buffer
    return pack(kind, encoded.head, body, log_bytes)
