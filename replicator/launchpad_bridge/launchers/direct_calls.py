"""Calls between nodes of one process without threads of a server: for a fixed order.

A handler, which a real server would run in a thread of its own, runs here in the
caller's, in its turn. Values and errors pass through the codec, as between processes,
so a program sees no difference.
"""

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicator.base.types import PyTree
from replicator.errors import CallTimeoutError, ConnectionLostError
from replicator.launchpad_bridge.launchers.turns import TurnEvent, Turns
from replicator.launchpad_bridge.running.stop_event import StopEvent
from replicator.rpc.client.client import Methods
from replicator.rpc.codec.codec import decode, encode
from replicator.rpc.codec.registry import DEFAULT_REGISTRY
from replicator.rpc.codec.wire_format import in_one_piece
from replicator.rpc.own_methods import LIST_METHODS
from replicator.rpc.remote_errors import describe_error, remote_error


class Exchange:
    """The servers of a program, by address."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        # By address. Only the thread that has the turn, or chooses the next, uses it:
        # no lock.
        self.servers: dict[str, DirectServer] = {}

    def serve(
        self, name: str, address: str, methods: Mapping[str, Callable[..., Any]]
    ) -> "DirectServer":
        """Take calls of some methods."""
        server = self.servers[address] = DirectServer(self, name, address, methods)
        return server

    def stop_event(self) -> StopEvent:
        """Return an event for an inner node; to wait for it is to let others go on."""
        return TurnEvent(self.turns)

    def client(
        self,
        address: str,
        *,
        timeout_s: float | None = None,
        wait_for_ready: bool = True,
        **unused: Any,
    ) -> "DirectClient":
        """Return a client."""
        return DirectClient(self, address, timeout_s, wait_for_ready)


@dataclasses.dataclass(frozen=True, eq=False)
class DirectServer:
    """Stand-in for `rpc.Server`."""

    exchange: Exchange
    name: str
    address: str
    methods: Mapping[str, Callable[..., Any]]

    def stop(self, drain_s: float = 0.0) -> None:
        """Take no more calls; those there were are over."""
        self.exchange.servers.pop(self.address, None)
        self.exchange.turns.look_again()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return at once: nothing runs on."""
        return True


class DirectClient(Methods[PyTree]):
    """Stand-in for `rpc.Client`."""

    def __init__(
        self,
        exchange: Exchange,
        address: str,
        timeout_s: float | None,
        wait_for_ready: bool,
    ) -> None:
        self.address = address
        self.futures = Methods(self._submit, timeout_s)
        self._exchange = exchange
        self._wait_for_ready = wait_for_ready
        super().__init__(self._call, timeout_s)

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _call(
        self,
        method: str,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        timeout_s: float | None,
    ) -> PyTree:
        """Call a method in this thread, in its turn."""
        given = _by_value((list(args), dict(kwargs)))
        with self._exchange.turns.guest():
            server = self._wait_server(method, timeout_s)
            if method == LIST_METHODS:
                return sorted(server.methods)
            return _by_value(self._run(server, method, given))

    def _submit(self, *call: Any) -> "concurrent.futures.Future[PyTree]":
        """Call a method; return its result or error, which there is already."""
        future: concurrent.futures.Future[PyTree] = concurrent.futures.Future()
        try:
            future.set_result(self._call(*call))
        except Exception as error:
            future.set_exception(error)
        return future

    def _wait_server(self, method: str, timeout_s: float | None) -> "DirectServer":
        servers = self._exchange.servers
        limit_s = math.inf if timeout_s is None else timeout_s
        where = f"`{method}` of the server at {self.address} was not called"
        is_there = self._exchange.turns.give_up(
            lambda: self.address in servers, limit_s if self._wait_for_ready else 0.0
        )
        if is_there:
            return servers[self.address]
        if self._wait_for_ready:
            raise CallTimeoutError(
                f"Deadline Exceeded: {where}: no server was ready within "
                f"{limit_s:.3g} s of the program's own time. Start it, or pass its "
                "address."
            )
        raise ConnectionLostError(
            f"{where}: failed to connect to all addresses. Start it."
        )

    def _run(self, server: DirectServer, method: str, given: PyTree) -> PyTree:
        args, kwargs = given
        try:
            if method not in server.methods:
                raise AttributeError(f"{server.name!r} has no method {method!r}.")
            return server.methods[method](*args, **kwargs)
        except BaseException as error:
            raise remote_error(
                describe_error(error, registry=DEFAULT_REGISTRY),
                method=method,
                server=repr(server.name),
                address=self.address,
                registry=DEFAULT_REGISTRY,
            ) from None


def _by_value(value: PyTree) -> PyTree:
    """Return a value as the other end of a connection would see it."""
    encoded = encode(value)
    return decode(encoded.head, in_one_piece(encoded.buffers))
