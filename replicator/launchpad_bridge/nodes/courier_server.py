"""A server under the names of Launchpad's courier: for objects that start their own."""

from collections.abc import Callable
from typing import Any, Protocol, final

_DRAIN_S = 10.0


class Listening(Protocol):
    """A server as `rpc` has it, or what a launcher puts in its place."""

    @property
    def address(self) -> str:
        """Return where clients reach it."""
        ...

    def stop(self, drain_s: float) -> None:
        """Take no more calls, answer those there are."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has stopped."""
        ...


@final
class CourierServer:
    """What `set_courier_server` is given: starts and stops when the object says so."""

    def __init__(
        self, start: Callable[[dict[str, Callable[..., Any]]], Listening]
    ) -> None:
        """Hold what starts a server of some methods."""
        self._start = start
        self._methods: dict[str, Callable[..., Any]] = {}
        self._has_started = False
        self._server: Listening | None = None

    @property
    def address(self) -> str:
        """Return where clients reach it; "" where it does not listen."""
        return "" if self._server is None else self._server.address

    @property
    def has_started(self) -> bool:
        """Return whether it was started."""
        return self._has_started

    def bind(self, name: str, function: Callable[..., Any]) -> None:
        """Let clients call a function; before the start."""
        self._methods[name] = function

    def start(self) -> None:
        """Listen, and serve. With nothing to serve it does not listen."""
        self._has_started = True
        if self._methods:
            self._server = self._start(self._methods)

    def stop(self, drain_s: float = _DRAIN_S) -> None:
        """Take no more calls, answer those there are; nothing if it never started."""
        if self._server is not None:
            self._server.stop(drain_s)

    def join(self) -> None:
        """Wait until it has stopped."""
        if self._server is not None:
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
