"""A server with Launchpad's courier names, for objects that start it themselves."""

from collections.abc import Callable
from typing import Any

_DRAIN_S = 10.0


class CourierServer:
    """Argument of `set_courier_server`: the object starts and stops it.

    Attributes:
      has_started: Whether it was started.
    """

    def __init__(self, start: Callable[[dict[str, Callable[..., Any]]], Any]) -> None:
        """Store the function that starts a server: of `rpc`, or of a launcher."""
        self.has_started = False
        self._start = start
        self._methods: dict[str, Callable[..., Any]] = {}
        self._server: Any = None

    @property
    def address(self) -> str:
        """Return the address for clients; "" if it does not listen."""
        return "" if self._server is None else self._server.address

    def bind(self, name: str, function: Callable[..., Any]) -> None:
        """Add a method for clients; before the start."""
        self._methods[name] = function

    def start(self) -> None:
        """Listen, and serve. Without methods it does not listen."""
        self.has_started = True
        if self._methods:
            self._server = self._start(self._methods)

    def stop(self, drain_s: float = _DRAIN_S) -> None:
        """Take no more calls and answer those that run; do nothing before a start."""
        if self._server is not None:
            self._server.stop(drain_s)

    def join(self) -> None:
        """Wait until it has stopped."""
        if self._server is not None:
            self._server.wait()

    def set_is_healthy(self, is_healthy: bool = True) -> None:
        """Do nothing: a server is healthy while it answers."""

    Start, Stop, Join, Bind, SetIsHealthy = start, stop, join, bind, set_is_healthy
