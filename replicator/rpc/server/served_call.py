"""One call in a server, and its state as its handler sees it: `current_call()`.

    received ──▶ waits for a thread ──▶ runs ──▶ its reply is sent
        └── cancelled, late, or the server stops: never run ──┘

A handler is not killed when its caller no longer waits: it should ask `is_cancelled()`.
"""

import math
import threading
import time
import types
from collections.abc import Mapping, Sequence
from typing import Protocol

from replicator.base.types import PyTree
from replicator.rpc.protocols import Connection, MessageKind
from replicator.rpc.server.methods import Method


class Caller(Protocol):
    """Client of a call: a `ServedConnection`, whose file imports this one.

    Attributes:
      connection: Connection to the client.
      name: Name that the client gave; None if it gave none.
      calls: Calls that have no answer yet, by number.
      is_stalled: Whether it has not taken a reply for a while.
    """

    connection: Connection
    name: str | None
    calls: dict[int, "ServedCall"]
    is_stalled: bool

    def run(self, call: "ServedCall") -> None:
        """Run a call in this thread, which has a slot for it."""

    def end(self, call: "ServedCall") -> None:
        """Forget a call that was answered, or whose client is gone."""

    def send(
        self,
        kind: MessageKind,
        value: PyTree = None,
        *,
        call_id: int = 0,
        timeout_s: float,
    ) -> None:
        """Send a message; disconnect a client that does not take it."""

    def send_goodbye(self) -> None:
        """Announce to the client that the server takes no more calls."""

    def give_up_calls(self) -> None:
        """Cancel the calls that run; refuse the calls that wait."""

    def abandon_calls(self) -> "list[ServedCall]":
        """Answer the calls that still run, and disconnect; return these calls."""
        ...

    def close(self) -> None:
        """Disconnect."""


class _RunningHere(threading.local):
    """The call that this thread runs."""

    call: "ServedCall | None" = None


# Set by `run` around a handler, and by a batch, which has several callers.
running_here = _RunningHere()


class ServedCall:
    """One call, from when it was read until its reply was sent.

    Handlers get it from `current_call()`, and may use all that has a docstring. Its
    attributes are written by the thread that reads and then by the one that runs it;
    `give_up` alone may be called by others, at any time.
    """

    # Class attributes, so that a call that runs at once need not set them.
    target = Method("(being read)", lambda: None)
    args: Sequence[PyTree] = ()
    kwargs: Mapping[str, PyTree] = types.MappingProxyType({})
    deadline_s = math.inf
    started_s = 0.0
    is_over = False  # its handler, not yet its reply
    is_counted = False  # in the bytes that its connection may hold
    is_given_up = False
    _event: threading.Event | None = None

    def __init__(
        self, caller: Caller, call_id: int, received_s: float, num_bytes: int
    ) -> None:
        """Begin with its header; method and arguments follow when its body was read."""
        self.caller = caller
        self.call_id = call_id
        self.received_s = received_s
        self.num_bytes = num_bytes

    @property
    def method(self) -> str:
        """Return the name of the method."""
        return self.target.name

    @property
    def peer(self) -> str:
        """Return a description of the client, for people."""
        return self.caller.connection.peer

    def remaining_s(self) -> float | None:
        """Return the time until the caller's deadline, 0 past it; None without one."""
        if self.deadline_s == math.inf:
            return None
        return max(0.0, self.deadline_s - time.monotonic())

    def is_cancelled(self) -> bool:
        """Return whether the caller no longer waits for the result.

        The caller gave up or is gone, its deadline passed, or the server stops and
        has waited long enough.
        """
        return self.is_given_up or time.monotonic() >= self.deadline_s

    def wait_cancelled(self, timeout_s: float) -> bool:
        """Wait until `is_cancelled`, at most `timeout_s`; return whether it is."""
        if self._event is None:
            self._event = threading.Event()
        if not self.is_given_up:  # looked at after the event is there for `give_up`
            left_s = min(timeout_s, self.deadline_s - time.monotonic())
            self._event.wait(max(0.0, left_s))
        return self.is_cancelled()

    def give_up(self) -> None:
        """Cancel the call; its handler should notice."""
        # Before the event is looked at; `wait_cancelled` makes that, then looks here.
        self.is_given_up = True
        if self._event is not None:
            self._event.set()


def current_call() -> ServedCall | None:
    """Return the call that this thread runs; None outside of a handler.

    >>> current_call() is None
    True
    """
    return running_here.call


def cancelled() -> bool:
    """Return whether the caller of this handler no longer waits; False outside of one.

    >>> cancelled()
    False
    """
    call = running_here.call
    return call is not None and call.is_cancelled()
