"""Interfaces between client, server and transports: messages, connections, listeners.

    courier     server, client: methods, deadlines, cancellation     knows no bytes
    transports  in-process, same host, gRPC: one message, whole      know no methods
    codec       a value is a head (msgpack) and the bytes of arrays  knows no sockets

A transport moves messages. It never looks into a value, and the courier above it never
sees a byte, so each stands in the tests without the other.
"""

import enum
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from replicator.base.types import PyTree


class MessageKind(enum.IntEnum):
    """Purpose of a message. Kinds from 128 on are a transport's own business."""

    CALL = 1
    """Client to server: `[method, args, kwargs, timeout_s]`, or more at its end; None
    stands for no arguments, and for no deadline."""
    REPLY = 2
    """Server to client: what the method returned."""
    ERROR = 3
    """Server to client: the reason why there is no reply."""
    CANCEL = 4
    """Client to server: nobody waits for this call any more."""
    PING = 5
    """Client to server: a keepalive, and a question about the state of some calls."""
    PONG = 6
    """Server to client: the reply to a ping, with the state of each known call."""
    GOODBYE = 7
    """Server to client: it completes the calls it has and takes no more."""


class Payload(Protocol):
    """The value of a message, decoded when it is asked for, in the asker's thread."""

    @property
    def num_bytes(self) -> int:
        """Return how many bytes it takes; 0 where nothing was encoded."""
        ...

    def take(self) -> PyTree:
        """Return the value, once: then only its taker keeps its memory alive.

        Arrays are read-only views, each of which does.

        Raises:
          DecodeError: The bytes are not a valid message, or exceed a limit.
        """
        ...


class Message(NamedTuple):
    """One message as it arrived."""

    kind: int
    call_id: int
    payload: Payload


class Connection(Protocol):
    """One authenticated connection; both ends have the same methods.

    Any thread may send; one thread at a time receives.
    """

    @property
    def peer(self) -> str:
        """Name the other end for people: an address, and a process id where known."""
        ...

    def send(
        self, kind: int, call_id: int, value: PyTree, *, timeout_s: float | None
    ) -> int:
        """Send one message whole; return its bytes.

        Raises:
          EncodeError: The value cannot be sent; nothing was.
          MessageTooLargeError: It is past the limit; nothing was sent.
          ConnectionLostError: The other end is gone.
          CallTimeoutError: The other end did not read for `timeout_s`.
        """
        ...

    def memory(self, num_bytes: int) -> np.ndarray | None:
        """Return memory, uint8 [num_bytes], for the long arrays of one message.

        A value whose first buffers lie in it, as `lay_out` places them, is sent without
        a copy. None: there is no such memory.
        """
        ...

    def receive(self, *, timeout_s: float | None) -> Message:
        """Return the next message.

        Raises:
          ConnectionLostError: The other end is gone, or sent an invalid message.
          CallTimeoutError: No message came within `timeout_s`; the next call goes on
            where this one stopped.
        """
        ...

    def has_received(self) -> bool:
        """Return whether `receive` has data to work on without waiting."""
        ...

    def fileno(self) -> int | None:
        """Return the descriptor that `select` may watch, or None."""
        ...

    def close(self) -> None:
        """Close it; a `receive` that waits raises. May be called twice, anywhere."""


class Listener(Protocol):
    """Accepts the connections of one transport."""

    @property
    def address(self) -> str:
        """Return the address that a client gives to `connect`."""
        ...

    def accept(self) -> Callable[[], Connection]:
        """Wait for a peer; return its handshake, to be run in a thread of its own.

        The returned function does the handshake, within its bound, and returns the
        connection, or raises `AuthenticationError` or `ConnectionLostError`.

        Raises:
          ConnectionLostError: The listener was closed.
        """
        ...

    def close(self) -> None:
        """Stop listening; a waiting `accept` raises. May be called twice."""
