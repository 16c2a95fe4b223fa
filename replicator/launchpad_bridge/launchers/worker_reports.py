"""Reports of a worker's process to its launcher: its result, its error, a stop it asks.

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
from replicator.rpc.codec.wire_format import in_one_piece
from replicator.rpc.protocols import MessageKind
from replicator.rpc.remote_errors import ErrorInfo, describe_error, remote_error

STOP = b"s"
"""From the launcher: a request to stop."""

GoodEnd: TypeAlias = Literal["returned", "stopped", "preempted"]
"""Outcome of a node that did not raise; `Exited` describes each."""

# Kind, size of the log before the traceback, size of the head, size of the body.
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
"""From the worker: a request to stop the whole run."""

ASK_UNIT_TO_STOP = _HEADER.pack(b"u", 0, 0, 0)
"""From the worker: it is preempted, and asks the others of its unit to stop."""


class ReportFrame(NamedTuple):
    """A frame as it arrived.

    Attributes:
      kind: One byte.
      log_bytes: Size of the worker's log before its traceback, if it raised.
      head: Head of the value, as the codec made it.
      body: Arrays of the value.
    """

    kind: bytes
    log_bytes: int
    head: bytes
    body: bytes

    @property
    def asks(self) -> Literal["run", "unit"] | None:
        """Scope of the stop that it asks for; None if it reports an end."""
        return _ASKS.get(self.kind)

    @property
    def raised(self) -> bool:
        """True if it holds an error."""
        return self.kind == _RAISED


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EndReport:
    """Report of a worker on its end.

    Attributes:
      kind: "raised", or the outcome of one that did not raise.
      result: Value that it returned, or an `Unsendable`.
      error: Error that it raised.
      notes: Notes of the error.
    """

    kind: GoodEnd | Literal["raised"]
    result: PyTree = None
    error: ErrorInfo | None = None
    notes: tuple[str, ...] = ()


def pack_result(result: PyTree, end: GoodEnd) -> bytes:
    """Return the frame for a result of a node.

    >>> [frame] = ReportFrameReader().feed(pack_result(3, "stopped"))
    >>> report = read_report(frame)
    >>> report.kind, report.result
    ('stopped', 3)
    """
    try:
        if isinstance(result, Unsendable):  # by a process that this one had started
            raise EncodeError(result.reason)
        encoded = encode((True, result), limits=_LIMITS)
    except (EncodeError, MessageTooLargeError) as error:
        encoded = encode((False, str(error)))
    return _pack_value(_ENDS[end], encoded)


def pack_error(error: BaseException, *, log_bytes: int) -> bytes:
    """Return the frame for an error of a node.

    >>> [frame] = ReportFrameReader().feed(pack_error(ValueError("a bug"), log_bytes=7))
    >>> frame.raised, frame.log_bytes, read_report(frame).error.text
    (True, 7, 'a bug')
    """
    info = describe_error(error, registry=DEFAULT_REGISTRY)
    notes = [str(note)[:_LONGEST_NOTE] for note in getattr(error, "__notes__", ())]
    notes = notes[:_MOST_NOTES]
    # Attributes are values of the user, which the codec may not take.
    try:
        encoded = encode((tuple(info), notes))
    except (EncodeError, MessageTooLargeError):
        encoded = encode((tuple(info._replace(attributes=None)), notes))
    return _pack_value(_RAISED, encoded, log_bytes)


def rebuild_error(info: ErrorInfo, *, worker: str, where: str) -> RemoteError:
    """Return the error of a worker as one of this process.

    Args:
      info: Description of the error.
      worker: Name of the worker.
      where: Process of the worker.
    """
    return remote_error(
        info, method="run", server=worker, address=where, registry=DEFAULT_REGISTRY
    )


def pack(
    kind: bytes, head: bytes, body: bytes | memoryview = b"", log_bytes: int = 0
) -> bytes:
    """Return the bytes of one frame."""
    return _HEADER.pack(kind, log_bytes, len(head), len(body)) + head + body


class ReportFrameReader:
    """Frames of one stream, whose bytes arrive in pieces."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def feed(self, data: bytes) -> list[ReportFrame]:
        """Take bytes as they arrive; return the frames that are whole.

        Raises:
          DecodeError: A frame is longer than a report may be.

        >>> reader, data = ReportFrameReader(), pack(b"j", b"{}")
        >>> reader.feed(data[:9]), len(reader.feed(data[9:]))
        ([], 1)
        """
        # Belongs to the one thread that reads the stream. It holds less than one frame
        # between two calls, and at most what the limit below allows.
        self._begun += data
        frames = []
        while len(self._begun) >= _HEADER.size:
            kind, log_bytes, head_bytes, body_bytes = _HEADER.unpack_from(self._begun)
            start = _HEADER.size + head_bytes
            # Before its bytes are waited for: a length of 2 ** 62 must not fill memory.
            if head_bytes + body_bytes > _MOST_BYTES:
                raise DecodeError("A report must not be longer than a message.")
            if len(self._begun) < start + body_bytes:
                break
            # Released before the bytes are cut off: a viewed bytearray keeps its size.
            with memoryview(self._begun) as view:
                head = bytes(view[_HEADER.size : start])
                body = bytes(view[start : start + body_bytes])
            del self._begun[: start + body_bytes]
            frames.append(ReportFrame(kind, log_bytes, head, body))
        return frames


def read_report(frame: ReportFrame) -> EndReport:
    """Return the report in a frame.

    Raises:
      DecodeError: It is not a report.
      MessageTooLargeError: It is past a limit.
    """
    kind = frame.kind
    value = decode(frame.head, frame.body, limits=_LIMITS)
    match kind, value:
        case (b"e", (tuple() as info, list() as notes)):
            return EndReport(
                kind="raised",
                error=_error_info(info),
                notes=tuple(str(note) for note in notes),
            )
        case (_, (bool() as sent, result)) if kind in _END_OF:
            return EndReport(
                kind=_END_OF[kind],
                result=result if sent else Unsendable(reason=str(result)),
            )
    raise DecodeError(f"A report must be of a known kind, got {kind!r}.")


def _error_info(values: tuple[Any, ...]) -> ErrorInfo:
    # The same values, and the same checks, as of an error that a server answers with.
    checked(MessageKind.ERROR, (RAISED, *values))
    names, text, trace, errno, attributes = values
    if not names:
        raise DecodeError("An error report must hold type names, text and traceback.")
    return ErrorInfo(tuple(names), text, trace, errno, attributes)


def _pack_value(kind: bytes, encoded: Encoded, log_bytes: int = 0) -> bytes:
    return pack(kind, encoded.head, in_one_piece(encoded.buffers), log_bytes)
