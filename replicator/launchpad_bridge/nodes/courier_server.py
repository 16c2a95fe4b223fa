"""A server under the names of Launchpad's courier: for objects that start their own."""

from collections.abc import Callable
from typing import Any, final

_DRAIN_S = 10.0


@final
class CourierServer:
    """What `set_courier_server` is given: starts and stops when the object says so.

    Attributes:
      has_started: Whether it was started.
    """

    def __init__(self, start: Callable[[dict[str, Callable[..., Any]]], Any]) -> None:
        """Hold what starts a server of some methods: of `rpc`, or a launcher's."""
        self.has_started = False
        self._start = start
        self._methods: dict[str, Callable[..., Any]] = {}
        self._server: Any = None

    @property
    def address(self) -> str:
        """Return where clients reach it; "" where it does not listen."""
        return "" if self._server is None else self._server.address

    def bind(self, name: str, function: Callable[..., Any]) -> None:
        """Let clients call a function; before the start."""
        self._methods[name] = function

    def start(self) -> None:
        """Listen, and serve. With nothing to serve it does not listen."""
        self.has_started = True
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

    Start, Stop, Join, Bind, SetIsHealthy = start, stop, join, bind, set_is_healthy
