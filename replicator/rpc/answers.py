"""Contents of an ERROR message: the reason why there is no reply, and details."""

from typing import Any, NamedTuple

from replicator.base.types import PyTree
from replicator.rpc.protocols import MessageKind
from replicator.rpc.remote_errors import ErrorInfo

RAISED = "raised"
"""No such method, or it raised, or its result cannot be sent. Then `ErrorInfo`."""
STOPPED = "stopped"
"""The server takes no more calls; this one was not run."""
ABANDONED = "abandoned"
"""The server stopped while the call ran."""
EXPIRED = "expired"
"""Its deadline passed before it ran. Then seconds."""
OVERRAN = "overran"
"""Its deadline passed while it ran, and the handler gave up. Then seconds."""
REASONS = frozenset({STOPPED, ABANDONED, EXPIRED, OVERRAN})
"""Those that are followed by seconds."""


class Answer(NamedTuple):
    """Reply or error of a call: the kind of message, and its value."""

    kind: int
    value: PyTree


def raised(info: ErrorInfo) -> Answer:
    """Return the answer for a method that raised.

    >>> raised(ErrorInfo(["KeyError"], "no such key")).value[:3]
    ('raised', ['KeyError'], 'no such key')
    """
    return Answer(MessageKind.ERROR, (RAISED, *info))


def not_run(why: str, seconds: float = 0.0) -> Answer:
    """Return the answer for a call that was not run, or not to its end.

    >>> not_run(EXPIRED, 1.5).value
    ('expired', 1.5)
    """
    return Answer(MessageKind.ERROR, (why, seconds))


def without_attributes(answer: Answer) -> Answer:
    """Return an answer of `raised` without the attributes of its exception."""
    info = ErrorInfo(*answer.value[1:])
    return raised(info._replace(attributes=None))


def read_error(value: Any) -> tuple[str, ErrorInfo | float]:
    """Take the value of an ERROR message apart, which was `checked`.

    >>> read_error(("expired", 1.5))
    ('expired', 1.5)
    """
    why, *details = value
    return why, ErrorInfo(*details) if why == RAISED else details[0]
