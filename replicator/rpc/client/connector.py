"""Connect a client to its server: one link, made when needed, again when lost."""

import dataclasses
import threading
import time
from collections.abc import Callable

from replicator.base.host.plain_text import plain
from replicator.errors import (
    AuthenticationError,
    CallTimeoutError,
    ConnectionLostError,
    DecodeError,
    RpcError,
)
from replicator.rpc.arrivals import checked
from replicator.rpc.client.background_reader import BackgroundReader
from replicator.rpc.client.call_errors import inherited
from replicator.rpc.client.link import Failure, Link, WaitingCall
from replicator.rpc.client.request import body_of
from replicator.rpc.client.retry import TryOutcome
from replicator.rpc.own_methods import HELLO, PROTOCOL, WELCOME
from replicator.rpc.protocols import Connection

_CONNECT_TIMEOUT_S = 10.0


@dataclasses.dataclass(eq=False)
class Connector:
    """Maker and holder of the link.

    Attributes:
      dial: Connects to the server within the given seconds.
      address: Address of the server, for errors.
      heartbeat_s: See `Link`.
      name: Name of the client in the server's statistics.
      link: Link that takes calls; None while there is none.
      server: Label of the server that answered last.
      retried: Idempotent methods of that server.
    """

    dial: Callable[[float], Connection]
    _: dataclasses.KW_ONLY
    address: str
    heartbeat_s: float
    name: str = ""

    def __post_init__(self) -> None:
        self.link: Link | None = None
        self.server = "the server"
        self.retried: frozenset[str] = frozenset()
        self.is_closed = False
        self._is_inherited = False
        # Held while connecting, hello included. `close` and `_forget` never take it:
        # they must get through meanwhile, and `lose` calls `_forget` in this thread.
        self._lock = threading.Lock()
        self._left: Link | None = None

    def drop_after_fork(self) -> list[WaitingCall]:
        """Refuse to connect in this forked child; return the calls that waited."""
        # The link is kept alive: only the parent may close it.
        self._left, self.link = self.link, None
        # A new lock: a thread of the parent may have held the old one.
        self._is_inherited, self._lock = True, threading.Lock()
        return [] if self._left is None else list(self._left.waiting.values())

    def connect(self, timeout_s: float) -> Link | Failure:
        """Return the link, a new one if need be; or the failure to connect.

        One thread connects, others wait for it.

        Raises:
          RpcError: The client belongs to the process that this one was forked from.
          AuthenticationError: One end did not prove that it belongs to the program.
          ArgumentError: The address is invalid, or there is no secret.
        """
        if self._is_inherited:
            raise inherited(self.address)
        until_s = time.monotonic() + min(max(timeout_s, 0.0), _CONNECT_TIMEOUT_S)
        if not self._lock.acquire(timeout=max(0.0, until_s - time.monotonic())):
            return Failure(TryOutcome.UNREACHABLE)
        try:
            # Another thread may have connected while this one waited for the lock.
            if self.link is not None or self.is_closed:
                return self.link or Failure(TryOutcome.UNREACHABLE)
            return self._connect(until_s)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the link for good, and fail the calls that wait."""
        # Before `link` is read: `_connect` sets that, then looks at this.
        self.is_closed = True
        link = self.link
        if link is not None:
            link.lose(ConnectionLostError("The client was closed."))

    def _connect(self, until_s: float) -> Link | Failure:
        try:
            connection = self.dial(max(1e-3, until_s - time.monotonic()))
        except AuthenticationError as error:
            # Also an OSError. Trying again does not help, unless the time for this try
            # was just too short for the server to prove anything.
            if time.monotonic() < until_s:
                raise
            return Failure(TryOutcome.UNREACHABLE, error)
        except (ConnectionLostError, CallTimeoutError, OSError) as error:
            return Failure(TryOutcome.UNREACHABLE, error)
        link = Link(connection, heartbeat_s=self.heartbeat_s, on_gone=self._forget)
        # Made here, as its file imports that of the link. No thread starts yet.
        link.reader = BackgroundReader(link)
        try:
            self._exchange_hello(link, until_s)
        except BaseException as error:
            link.lose(ConnectionLostError("The server sent no hello."))
            if not isinstance(error, RpcError):
                raise
            return Failure(TryOutcome.UNREACHABLE, error)
        self.link = link
        # After `link` is set: `close` sets the flag, then reads `link`; one sees both.
        if self.is_closed or link.lost is not None:
            link.lose(ConnectionLostError("The client was closed."))
            return Failure(TryOutcome.UNREACHABLE, link.lost)
        return link

    def _exchange_hello(self, link: Link, until_s: float) -> None:
        """Send the client's name; receive the server's label and method names."""
        timeout_s = max(1e-3, until_s - time.monotonic())
        # Call 0; those of users count from 1.
        body = body_of(HELLO, [self.name], {}, timeout_s)
        answer = link.ask(0, body, timeout_s, until_s)
        if isinstance(answer, Failure):
            try:
                raise answer.cause or CallTimeoutError("It sent no hello in time.")
            finally:
                del answer  # its cause holds this frame, and its callers
        protocol, label, retried = checked(WELCOME, answer.payload.take())
        if protocol != PROTOCOL:
            raise DecodeError(f"It speaks version {protocol}, this is {PROTOCOL}.")
        self.server, self.retried = plain(label), frozenset(retried)

    def _forget(self, link: Link) -> None:
        # Without the lock, which `_connect` of another thread may hold for seconds. A
        # newer link, which that one has set meanwhile, stays.
        if self.link is link:
            self.link = None
