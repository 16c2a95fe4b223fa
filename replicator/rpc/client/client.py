"""Call the methods of an object that lives in another thread, process or host.

>>> class Counter:
...     def next(self, n):
...         return n + 1
>>> with rpc.Server(Counter()) as server, Client(server.address) as client:
...     client.next(3)                            # waits for the result
...     future = client.futures.next(4)           # does not
...     client.call("next", [5], timeout_s=None)  # spelled out: no deadline
...     future.result()
4
6
5
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, Self, TypeVar

from replicator.base.host.plain_text import plain
from replicator.base.types import PyTree
from replicator.errors import ArgumentError, DecodeError
from replicator.rpc.arrivals import checked
from replicator.rpc.call_statistics import (
    CallerStatistics,
    MethodStatistics,
    ServerStatistics,
)
from replicator.rpc.client.call_futures import CallFuture
from replicator.rpc.client.calls import Calls
from replicator.rpc.client.connector import Connector
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import DEFAULT_REGISTRY, Registry
from replicator.rpc.own_methods import LIST_METHODS, STATISTICS
from replicator.rpc.protocols import Connection
from replicator.rpc.security.secret import Secret
from replicator.rpc.security.tls import Tls
from replicator.rpc.transports.connect import connect

DEFAULT_TIMEOUT_S = 60.0
_OF_CLIENT: Final = math.nan  # this very object stands for the client's `timeout_s`
_DEFAULT_LIMITS = MessageLimits()
_Made = TypeVar("_Made")


class Methods(Generic[_Made]):
    """The methods of a server, each of which makes a call."""

    def __init__(
        self,
        make: Callable[
            [str, Sequence[PyTree], Mapping[str, PyTree], float | None], _Made
        ],
        timeout_s: float | None,
    ) -> None:
        self._make = make
        self._timeout_s = timeout_s

    def __getattr__(self, name: str) -> Callable[..., _Made]:
        if name.startswith("_"):
            raise AttributeError(f"A client has no private method, got {name!r}.")
        make, timeout_s = self._make, self._timeout_s

        def method(*args: PyTree, **kwargs: PyTree) -> _Made:
            return make(name, args, kwargs, timeout_s)

        # Two threads may make it at once: either of the two is right.
        self.__dict__[name] = method  # the next look finds it there
        return method

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> _Made:
        """Call the `__call__` of the server's object."""
        return self._make("__call__", args, kwargs, self._timeout_s)

    def call(
        self,
        method: str,
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
        *,
        timeout_s: float | None = _OF_CLIENT,
    ) -> _Made:
        """Call a method and wait for its result: `client.method(...)` in full.

        Args:
          method: Name of the method.
          args: Arguments by position.
          kwargs: Arguments by name.
          timeout_s: Deadline of this call, also for the handler; None: none. By default
            that of the client.

        Returns:
          Result of the method; arrays are read-only. `client.futures` returns a future:
          it never waits for a server, and `cancel` reaches the handler. Functions given
          to `add_done_callback` run in the thread that reads.

        Raises:
          EncodeError: An argument cannot be sent; the error names it. This one and the
            next `client.futures` raises, too; all others are in the future.
          MessageTooLargeError: The arguments are past the limit.
          RemoteError: The method raised; also of the type that it raised.
          CallTimeoutError: No answer came in time; names the state of the server.
          ConnectionLostError: The server is gone; the call may have run.
          ServerStoppedError: The server stopped while the call ran.
          AuthenticationError: The server and this client are of different programs.
          CallCancelledError: The client was closed.
        """
        timeout_s = _timeout_of_call(timeout_s, self._timeout_s)
        return self._make(method, args, kwargs or {}, timeout_s)


class Futures(Methods[CallFuture]):
    """Methods of a server that return a future each."""


class Client(Methods[PyTree]):
    """Calls a server's methods as if they were its own.

    Any thread may use it. A call runs at most once, unless its method is `idempotent`;
    it ends within its deadline with a result or an error that names method, server and
    address; a server that was started again is found by the next call.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: Secret | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        wait_for_ready: bool = True,
        registry: Registry = DEFAULT_REGISTRY,
        limits: MessageLimits = _DEFAULT_LIMITS,
        tls: Tls | None = None,
        insecure: bool = False,
        heartbeat_s: float = 1.0,
        dial: Callable[[float], Connection] | None = None,
        name: str = "",
    ) -> None:
        """Make a client; it connects at its first call.

        Args:
          address: Value of `Server.address`.
          secret: Secret of the program; by default the file beside a Unix socket, or
            the one that the environment points to.
          timeout_s: Deadline of each call; None: none, calls may wait for ever.
          wait_for_ready: Whether a call waits, within its deadline, for a server that
            is not there (yet). If not, it raises at once.
          registry: Classes that may travel.
          limits: Limits of messages.
          tls: Files of a client, for gRPC.
          insecure: Whether to do without TLS, for gRPC beyond this host.
          heartbeat_s: Seconds without an answer after which the server is pinged;
            after five times that it counts as silent.
          dial: Connects within the given seconds, for transports of your own.
          name: Name under which the server counts this client's calls.

        Raises:
          ArgumentError: A number is out of range.
        """
        _checked_timeout("heartbeat_s", heartbeat_s)
        self._address = address
        timeout_s = _checked_timeout("timeout_s", timeout_s)
        dial = dial or (
            lambda left_s: connect(
                address,
                secret=secret,
                registry=registry,
                limits=limits,
                timeout_s=left_s,
                tls=tls,
                insecure=insecure,
            )
        )
        self._calls = Calls(
            Connector(dial, address=address, heartbeat_s=heartbeat_s, name=name),
            address=address,
            registry=registry,
            wait_for_ready=wait_for_ready,
        )
        self._futures = Futures(self._calls.submit, timeout_s)
        super().__init__(self._calls.call, timeout_s)

    @property
    def address(self) -> str:
        """Return where the server is."""
        return self._address

    @property
    def futures(self) -> Futures:
        """Return the same methods, which return a `concurrent.futures.Future` each."""
        return self._futures

    def wait_for_ready(self, *, timeout_s: float | None = _OF_CLIENT) -> None:
        """Wait until the server answers.

        Raises:
          CallTimeoutError: It did not within `timeout_s`, the client's by default.
        """
        self._calls.wait_until_ready(_timeout_of_call(timeout_s, self._timeout_s))

    def close(self) -> None:
        """Disconnect; calls that wait raise `CallCancelledError`."""
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._address!r})"


def list_methods(client: Client) -> list[str]:
    """Return the names of the methods that a client's server offers.

    Args:
      client: Client of the server; errors are those of a call.

    >>> class Counter:
    ...     def next(self, n):
    ...         return n + 1
    >>> with rpc.Server(Counter()) as server, Client(server.address) as client:
    ...     list_methods(client)
    ['next']
    """
    return list(checked(LIST_METHODS, client.call(LIST_METHODS)))


def statistics(client: Client) -> ServerStatistics:
    """Return what a client's server knows of its calls; see `Server.statistics`.

    Args:
      client: Client of the server; errors are those of a call. The answer needs no
        free place in the server's pool.

    >>> class Counter:
    ...     def next(self, n):
    ...         return n + 1
    >>> with rpc.Server(Counter()) as server, Client(server.address) as client:
    ...     _ = client.next(3)
    ...     statistics(client).methods["next"].calls
    1
    """
    known = client.call(STATISTICS)
    try:
        methods = _each(MethodStatistics, known.pop("methods"))
        callers = _each(CallerStatistics, known.pop("callers"))
        return ServerStatistics(methods=methods, callers=callers, **_numbers(known))
    except (AttributeError, KeyError, TypeError) as error:
        raise DecodeError("Malformed statistics reply.") from error


def _each(kind: Callable[..., Any], named: dict[str, Any]) -> dict[str, Any]:
    return {plain(name): kind(**_numbers(fields)) for name, fields in named.items()}


def _numbers(fields: dict[str, Any]) -> dict[str, Any]:
    if not all(isinstance(value, int | float) for value in fields.values()):
        raise TypeError
    return fields


def fail_fast(client: Client) -> None:
    """Make pending and future calls fail at once if the server is gone.

    For programs that end, where no server will start any more.

    Args:
      client: Client whose calls raise `ConnectionLostError` from now on, at once or
        after a last try.
    """
    client._calls.wait_for_ready = False


def _timeout_of_call(timeout_s: float | None, of_client: float | None) -> float | None:
    if timeout_s is _OF_CLIENT:
        return of_client
    return _checked_timeout("timeout_s", timeout_s)


def _checked_timeout(name: str, seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ArgumentError(
            f"`{name}` must be more than 0 seconds, got {seconds!r}. Use 60, or None "
            "to wait for ever."
        )
    return None if seconds is None else float(seconds)
