"""Hand messages from thread to thread of one process: by reference, nothing is copied.

`REPLICATOR_RPC_FORCE_ENCODING=1`, or `force_encoding=True`, sends every value through
the codec instead, as between processes: it proves that calls do not rely on sharing,
and that their values can be sent.
"""

import dataclasses
import functools
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from replicator.base.host.forks import register_fork_drop
from replicator.base.types import PyTree
from replicator.errors import AddressInUseError, CallTimeoutError, ConnectionLostError
from replicator.rpc.codec.encoded_once import EncodedOnce
from replicator.rpc.codec.wire_format import in_one_piece
from replicator.rpc.protocols import Message, Payload
from replicator.rpc.transports.frames import check_fits, lay_out
from replicator.rpc.transports.payloads import EncodedPayload, Encoding, PlainPayload

FORCE_ENCODING_VARIABLE = "REPLICATOR_RPC_FORCE_ENCODING"
_WAITING_MESSAGES = 1024
_WAITING_CLIENTS = 128
_Item = TypeVar("_Item")


@dataclasses.dataclass(eq=False)
class InProcessConnection:
    """One end of a connection within this process; see `Connection`.

    Attributes:
      peer: Name of the other end, for people.
      incoming: Queue that is the other end's `outgoing`.
      outgoing: Queue that is its `incoming`.
      encoding: Encoding of values.
      force_encoding: Whether values pass through it.
    """

    peer: str
    _: dataclasses.KW_ONLY
    # Both have locks of their own, and none is held while the other is used.
    incoming: "_Queue[Message]"
    outgoing: "_Queue[Message]"
    encoding: Encoding
    force_encoding: bool

    def send(
        self, kind: int, call_id: int, value: PyTree, *, timeout_s: float | None
    ) -> int:
        """Send one message; return its bytes, 0 without encoding. See `Connection`."""
        if self.force_encoding:
            payload = self._encoded(value)
        else:
            is_kept = type(value) is EncodedOnce
            payload = PlainPayload(value.value if is_kept else value)
        try:
            self.outgoing.put(Message(kind, call_id, payload), timeout_s)
        except TimeoutError:
            raise CallTimeoutError(
                f"{self.peer} does not read: there was no room for a message within "
                "its time."
            ) from None
        except EOFError:
            raise self._lost() from None
        return payload.num_bytes

    def memory(self, num_bytes: int) -> None:
        """Return None: it has none that the other end sees."""

    def receive(self, *, timeout_s: float | None) -> Message:
        """Return the next message. See `Connection`."""
        try:
            return self.incoming.take(timeout_s)
        except TimeoutError:
            raise CallTimeoutError(
                f"{self.peer} sent no message within {timeout_s:g} s."
            ) from None
        except EOFError:
            raise self._lost() from None

    def has_received(self) -> bool:
        """Return whether `receive` has a message without waiting."""
        return bool(self.incoming)

    def fileno(self) -> int | None:
        """Return None: there is nothing to `select` on."""
        return None

    def close(self) -> None:
        """Close it; messages on the way to the other end still arrive there."""
        # The other end may still take what was sent; this end drops what it received.
        self.outgoing.end()
        self.incoming.end(drop=True)

    def _encoded(self, value: PyTree) -> Payload:
        head, buffers, _ = self.encoding.encode(value)
        check_fits(head, lay_out(buffers), self.encoding.limits)
        return EncodedPayload(head, in_one_piece(buffers), self.encoding)

    def _lost(self) -> ConnectionLostError:
        return ConnectionLostError(f"The connection is lost: {self.peer} is closed.")


class InProcessListener:
    """Listener for clients of this process; see `Listener`."""

    def __init__(
        self,
        name: str = "",
        *,
        encoding: Encoding,
        force_encoding: bool | None = None,
    ) -> None:
        """Enter the process's table of listeners.

        Args:
          name: Name in the table; an empty one is made up.
          encoding: Encoding of values, where they are encoded.
          force_encoding: Whether they are; by default as in the environment.

        Raises:
          AddressInUseError: The name is taken.
        """
        self._name = name or secrets.token_hex(8)
        self._encoding = encoding
        if force_encoding is None:
            force_encoding = os.environ.get(FORCE_ENCODING_VARIABLE, "0") not in "0"
        self._force_encoding = force_encoding
        self._arrivals: _Queue[InProcessConnection] = _Queue(_WAITING_CLIENTS)
        # Atomic: of two listeners with one name, one gets it.
        if _LISTENERS.setdefault(self._name, self) is not self:
            raise AddressInUseError(
                f"`address` must be free, got {self.address}, where this process "
                f"({os.getpid()}) listens already. Choose another name."
            )
        register_fork_drop(self)

    @property
    def address(self) -> str:
        """Return the address that a client gives to `connect`."""
        return f"inproc:{self._name}"

    def accept(self) -> Callable[[], InProcessConnection]:
        """Wait for a client; there is nothing that it must prove. See `Listener`."""
        try:
            connection = self._arrivals.take(None)
        except EOFError:
            raise ConnectionLostError(f"{self.address} is closed.") from None
        return lambda: connection

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if _LISTENERS.get(self._name) is self:
            del _LISTENERS[self._name]
        # Ended first, so that none is added to the arrivals that are closed here.
        self._arrivals.end()
        while self._arrivals:
            self._arrivals.take(0).close()  # came too late to be accepted

    def drop_after_fork(self) -> None:
        """Leave the table of a forked child, where nobody accepts; see `forks`."""
        _LISTENERS.pop(self._name, None)

    def connect(self, timeout_s: float) -> InProcessConnection:
        """Return a client's end of a new connection.

        Raises:
          ConnectionLostError: The listener was closed, or does not accept.
        """
        to_server: _Queue[Message] = _Queue(_WAITING_MESSAGES)
        to_client: _Queue[Message] = _Queue(_WAITING_MESSAGES)
        end = functools.partial(
            InProcessConnection,
            encoding=self._encoding,
            force_encoding=self._force_encoding,
        )
        ours = end(self.address, incoming=to_client, outgoing=to_server)
        client = f"a client of {self.address}"
        theirs = end(client, incoming=to_server, outgoing=to_client)
        # The handshake of other transports: there is nothing to prove within a process.
        try:
            self._arrivals.put(theirs, timeout_s)
        except (EOFError, TimeoutError):
            raise ConnectionLostError(f"{self.address} accepts no clients.") from None
        return ours


def is_in_process(name: str) -> bool:
    """Return whether this process has a listener of that name.

    >>> is_in_process("nobody-is-here")
    False
    """
    return name in _LISTENERS


def connect_in_process(name: str, *, timeout_s: float) -> InProcessConnection:
    """Connect to a listener of this process.

    Raises:
      ConnectionLostError: The name is unknown, or its listener accepts no clients.
    """
    listener = _LISTENERS.get(name)
    if listener is None:
        raise ConnectionLostError(f"Nobody listens at inproc:{name} in this process.")
    return listener.connect(timeout_s)


# Changed by single atomic operations, in any thread.
_LISTENERS: dict[str, InProcessListener] = {}


class _Queue(Generic[_Item]):
    """A bounded queue that can end."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: deque[_Item] = deque()
        self._has_ended = False
        # Guards all of these; no other lock is taken under it. Reentrant: the garbage
        # collector may close a connection inside of it.
        self._lock = threading.RLock()
        self._has_item = threading.Condition(self._lock)  # `take` waits for it
        self._has_room = threading.Condition(self._lock)  # `put` waits for it

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, item: _Item, timeout_s: float | None) -> None:
        """Append; raise TimeoutError while it is full, EOFError after its end."""
        with self._lock:
            if len(self._items) >= self._most and not self._has_ended:
                self._has_room.wait_for(
                    lambda: len(self._items) < self._most or self._has_ended, timeout_s
                )
            if self._has_ended:
                raise EOFError
            if len(self._items) >= self._most:
                raise TimeoutError
            self._items.append(item)
            self._has_item.notify()

    def take(self, timeout_s: float | None) -> _Item:
        """Return the first; raise TimeoutError if none comes, EOFError at the end."""
        with self._lock:
            if not self._items and not self._has_ended:
                self._has_item.wait_for(
                    lambda: self._items or self._has_ended, timeout_s
                )
            # Items that are left are still taken after the end.
            if self._items:
                self._has_room.notify()
                return self._items.popleft()
        raise EOFError if self._has_ended else TimeoutError

    def end(self, *, drop: bool = False) -> None:
        """Take nothing more, and wake all that wait; `drop` also the items in it."""
        with self._lock:
            self._has_ended = True
            if drop:
                self._items.clear()
            self._has_item.notify_all()
            self._has_room.notify_all()
