"""Offer the methods of an object to other threads, processes and hosts.

>>> class Counter:
...     total = 0
...     def add(self, n):
...         self.total += n
...         return self.total
>>> with rpc.Server(Counter()) as server, rpc.Client(server.address) as counter:
...     counter.add(3)
3
"""

import atexit
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from replicator.base.host.forks import register_fork_drop
from replicator.errors import (
    ArgumentError,
    ConnectionLostError,
    RpcError,
    check_count,
)
from replicator.rpc.call_statistics import ServerStatistics
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import DEFAULT_REGISTRY, Registry
from replicator.rpc.protocols import Connection, Listener
from replicator.rpc.security.secret import Secret
from replicator.rpc.security.tls import Tls
from replicator.rpc.server.descriptors import raise_limit
from replicator.rpc.server.methods import method_of_function, methods_of
from replicator.rpc.server.refusal_log import RefusalLog
from replicator.rpc.server.served_call import ServedCall, current_call
from replicator.rpc.server.served_connection import ServedConnection
from replicator.rpc.server.service import Service
from replicator.rpc.transports.addresses import parse_all
from replicator.rpc.transports.connect import listen

_log = logging.getLogger(__name__)

DEFAULT_ADDRESS = "inproc:,unix:"
DRAIN_S = 10.0
CANCEL_S = 1.0
"""How long cancelled handlers have to notice it, when a server stops."""
MAX_HANDSHAKES = 64
"""How many clients may prove themselves at once, at each address; others wait."""
_LOOK_S = 0.05
_DEFAULT_LIMITS = MessageLimits()


class Server:
    """Server of the public methods that an object declares, and of functions.

    A handler runs in a thread of the server, several at a time: data that they share
    needs a lock. `current_call` returns a handler's deadline.
    """

    def __init__(
        self,
        instance: object = None,
        *,
        name: str | None = None,
        address: str = DEFAULT_ADDRESS,
        pool_size: int = 16,
        secret: Secret | None = None,
        registry: Registry = DEFAULT_REGISTRY,
        limits: MessageLimits = _DEFAULT_LIMITS,
        tls: Tls | None = None,
        insecure: bool = False,
        listeners: Sequence[Listener] | None = None,
    ) -> None:
        """Make a server; `start` starts it, as does `with`.

        Args:
          instance: Object whose methods are offered; None: those of `bind` alone.
          name: Name in errors and logs; by default the class's name.
          address: Address to listen at, or several joined by commas. By default in this
            process and at a Unix socket of a fresh private directory.
          pool_size: Number of handlers that may run at once.
          secret: Secret that clients must know; by default the file beside the Unix
            socket, or the one that the environment points to.
          registry: Classes that may travel.
          limits: Limits of messages, and of the calls that one client has in flight.
          tls: Files of a server, for gRPC; needed beyond loopback.
          insecure: Whether to do without TLS there, too.
          listeners: Listeners to use instead, for transports of your own.

        Raises:
          ArgumentError: The object declares no public method; a number or address is
            invalid.
        """
        check_count("pool_size", pool_size)
        if listeners is None:
            parse_all(address)
        self._methods = {} if instance is None else methods_of(instance)
        default_name = "server" if instance is None else type(instance).__name__
        self._name = default_name if name is None else name
        self._listen = functools.partial(
            listen,
            secret=secret,
            registry=registry,
            limits=limits,
            tls=tls,
            insecure=insecure,
        )
        self._address = address
        self._listeners = listeners
        self._service = Service(
            self._methods,
            label=f"{self._name!r} (process {os.getpid()})",
            pool_size=pool_size,
            limits=limits,
            registry=registry,
        )
        self._refusals = RefusalLog(self._name, _log)
        # Guards `_is_started`, `_is_stopping` and `_give_up_s`. Neither a client nor a
        # handler is waited for while it is held.
        self._phase_lock = threading.Lock()
        self._is_started = False
        self._is_stopping = False
        self._is_inherited = False
        self._give_up_s = 0.0
        self._stopped = threading.Event()

    @property
    def name(self) -> str:
        """Return the name in errors and logs."""
        return self._name

    @property
    def address(self) -> str:
        """Return the address that clients of this server are given.

        Raises:
          RpcError: It was not started: a socket may have no path yet.
        """
        if not self._is_started or self._listeners is None:
            raise RpcError(f"Server {self._name!r} has no address yet. `start` it.")
        return ",".join(listener.address for listener in self._listeners)

    def bind(self, name: str, function: Callable[..., Any]) -> Self:
        """Offer a function under a name; in place of a method that has it.

        Args:
          name: A public Python name, or `__call__`.
          function: Function to offer; may be marked `idempotent`.

        Returns:
          The server.

        Raises:
          ArgumentError: The name is not public, or the server was started.

        >>> server = rpc.Server().bind("add", lambda a, b: a + b)
        >>> server
        <Server 'server' of add>
        """
        if self._is_started:
            raise ArgumentError(
                f"`bind` must come before `start`, got {name!r} after it. Bind it "
                "before."
            )
        self._methods[name] = method_of_function(name, function)
        return self

    def start(self) -> Self:
        """Listen, and serve clients.

        Returns:
          The server.

        Raises:
          AddressInUseError: Another server listens there; names its process.
          AuthenticationError: Others may enter the socket's directory.
          ArgumentError: There is nothing to serve, or it was started before.
        """
        with self._phase_lock:
            if self._is_started:
                raise ArgumentError(
                    f"`start` must be called once, got a second time for "
                    f"{self._name!r}. Make a new `Server`."
                )
            if not self._methods:
                raise ArgumentError(
                    "A server must offer a method, got none. Pass an object, or `bind` "
                    "a function."
                )
            if self._listeners is None:
                self._listeners = listen_at(self._address, self._listen)
            self._is_started = True
        for method in self._methods.values():
            self._service.pool.leave_room_for(method.batch_size)
        _warn_of_batches(self._methods.values(), self._service.pool.size)
        raise_limit()
        # At exit the server's threads, which are daemons, still run. A process that
        # dies without it answers nothing: its clients see their connections end.
        atexit.register(self.stop, 0.0)
        register_fork_drop(self)
        self._service.threads.run(self._service.handoff.watch)
        for listener in self._listeners:
            self._service.threads.run(functools.partial(self._accept, listener))
        return self

    def stop(self, drain_s: float = DRAIN_S) -> None:
        """Take no more calls, complete the pending ones, disconnect.

        From inside a handler it returns at once, and the server stops when that handler
        and the others are done. A second `stop` may shorten the first.

        Args:
          drain_s: Seconds that calls may take. Then handlers are cancelled (see
            `current_call`), and a second later their callers get
            `ServerStoppedError`; the log names handlers that run on.
        """
        if self._is_inherited:
            return
        until_s = time.monotonic() + drain_s
        # One thread stops the server; a second `stop` may only bring the end forward.
        with self._phase_lock:
            is_first = not self._is_stopping
            self._give_up_s = until_s if is_first else min(self._give_up_s, until_s)
            self._is_stopping = True
        if is_first and not self._is_own_handler():
            self._stop()
        elif is_first:
            # Not this thread, whose handler `_stop` waits for. A daemon, so that a
            # handler that never ends does not keep the process.
            threading.Thread(target=self._stop, name="rpc stop", daemon=True).start()
        elif not self._is_own_handler():
            self._stopped.wait(drain_s + CANCEL_S + 5.0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the server has stopped; return whether it has.

        Raises:
          RpcError: A handler of the server waits without a bound: that never ends.
        """
        if timeout_s is None and self._is_own_handler():
            raise RpcError(
                f"A handler of {self._name!r} waits for its end, which waits for the "
                "handler. Call `stop` and return."
            )
        return self._stopped.wait(timeout_s)

    def drop_after_fork(self) -> None:
        """Count as stopped in this forked child; its parent serves. See `forks`."""
        self._is_inherited = True
        atexit.unregister(self.stop)
        # A new one: a thread of the parent may have held the lock of the old one.
        self._stopped = threading.Event()
        self._stopped.set()

    def statistics(self) -> ServerStatistics:
        """Return what is known of the calls so far and of those that run now."""
        return self._service.statistics()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Server {self._name!r} of {', '.join(sorted(self._methods))}>"

    # Arriving clients.

    def _accept(self, listener: Listener) -> None:
        """Accept clients; each proves itself in a thread of its own."""
        # Bounds the handshakes of this listener: strangers who fill one address keep
        # nobody out at another. Released by the handshake's thread.
        places = threading.BoundedSemaphore(MAX_HANDSHAKES)
        while True:
            places.acquire()
            try:
                handshake = listener.accept()
                self._service.threads.run(
                    functools.partial(self._meet, handshake, places.release)
                )
            except ConnectionLostError:
                places.release()
                return
            except Exception:
                places.release()
                _log.exception("%s could not take a client", self._name)
                if self._stopped.wait(_LOOK_S):
                    return

    def _meet(
        self, handshake: Callable[[], Connection], leave_place: Callable[[], None]
    ) -> None:
        try:
            connection = handshake()
        except RpcError as error:
            self._refusals.warn(error)
            return
        finally:
            # However it ended, as `_accept` waits for a place.
            leave_place()
        served = ServedConnection(self._service, connection)
        self._service.connections.add(served)
        if self._is_stopping:  # looked at after `_stop` could see the connection
            served.send_goodbye()
            served.close()
            return
        served.serve()

    # Stopping.

    def _is_own_handler(self) -> bool:
        call = current_call()
        caller = None if call is None else call.caller
        return isinstance(caller, ServedConnection) and caller.service is self._service

    def _stop(self) -> None:
        atexit.unregister(self.stop)
        service = self._service
        # Before `_drain` counts: `_take` enters a call, then looks at this.
        service.takes_calls = False
        for caller in service.connections.copy():
            caller.send_goodbye()
        self._drain()
        left = [
            call
            for caller in service.connections.copy()
            for call in caller.abandon_calls()
        ]
        # Last: with some transports connections do not outlive their listener; a client
        # that arrives meanwhile is turned away by `_meet`.
        for listener in self._listeners or ():
            listener.close()
        if left:
            _log.warning("%s stopped; still running: %s", self._name, _named(left))
        service.handoff.close()
        if service.selector_loop is not None:
            service.selector_loop.close()
        service.threads.close(0.0 if left else CANCEL_S)
        self._stopped.set()

    def _drain(self) -> None:
        """Wait for the calls there are, then for those that were cancelled."""
        # Read at each look: a second `stop` may bring it forward. One look at least is
        # for what is just about to end.
        soon_s = time.monotonic() + _LOOK_S
        if self._have_ended(lambda: max(self._give_up_s, soon_s)):
            return
        for caller in self._service.connections.copy():
            caller.give_up_calls()
        until_s = time.monotonic() + CANCEL_S
        # What runs on after that is named in the log: a thread of Python cannot be
        # ended from outside.
        self._have_ended(lambda: until_s)

    def _have_ended(self, until_s: Callable[[], float]) -> bool:
        """Wait until no call runs or waits; return whether that came in time."""
        service = self._service
        while service.calls_left:
            if time.monotonic() >= until_s():
                return False
            service.call_ended.wait(_LOOK_S)
            # Before the calls are counted again: `end` takes one out, then sets this.
            service.call_ended.clear()
        return True


def listen_at(addresses: str, listen: Callable[[str], Listener]) -> list[Listener]:
    """Listen at all addresses, joined by commas, or at none."""
    listeners: list[Listener] = []
    try:
        for address in addresses.split(","):
            listeners.append(listen(address.strip()))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _warn_of_batches(methods: Any, pool_size: int) -> None:
    for method in methods:
        if method.batch_size > pool_size:
            _log.warning(
                "`%s` merges %d calls, and `pool_size` is %d: no batch ever fills. "
                "Use `pool_size=%d` or more.",
                *(method.name, method.batch_size, pool_size, method.batch_size),
            )


def _named(calls: Sequence[ServedCall]) -> str:
    now_s = time.monotonic()
    return ", ".join(
        f"`{call.method}` for {now_s - call.received_s:.1f} s" for call in calls
    )
