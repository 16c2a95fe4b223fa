"""A server under the names of Launchpad's courier: for objects that start their own."""

from collections.abc import Callable
from typing import Any, final

from replicator.rpc.server import Server

_DRAIN_S = 10.0


@final
class CourierServer:
    """What `set_courier_server` is given: starts and stops when the object says so."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._has_started = False
        self._has_methods = False

    @property
    def address(self) -> str:
        """Return where clients reach it; "" where it does not listen."""
        return self._server.address if self._is_serving else ""

    @property
    def _is_serving(self) -> bool:
        return self._has_started and self._has_methods

    @property
    def has_started(self) -> bool:
        """Return whether it was started."""
        return self._has_started

    def bind(self, name: str, function: Callable[..., Any]) -> None:
        """Let clients call a function; before the start."""
        self._server.bind(name, function)
        self._has_methods = True

    def start(self) -> None:
        """Listen, and serve. With nothing to serve it does not listen."""
        self._has_started = True
        if self._has_methods:
            self._server.start()

    def stop(self, drain_s: float = _DRAIN_S) -> None:
        """Take no more calls, answer those there are; nothing if it never started."""
        if self._is_serving:
            self._server.stop(drain_s)

    def join(self) -> None:
        """Wait until it has stopped."""
        if self._is_serving:
            self._server.wait()

    def set_is_healthy(self, is_healthy: bool = True) -> None:
        """Do nothing: a server is healthy while it answers."""

    def __getattr__(self, name: str) -> Any:
        if name in _UPSTREAM:
            return getattr(self, _UPSTREAM[name])
        raise AttributeError(f"A courier server has no `{name}`.")


_UPSTREAM = {
    "Start": "start",
    "Stop": "stop",
    "Join": "join",
    "Bind": "bind",
    "SetIsHealthy": "set_is_healthy",
}
