"""`courier.Server`: functions at a port of this host, without a program."""

import socket
import weakref
from collections.abc import Callable
from typing import Any

from replicator.errors import AddressInUseError, ArgumentError
from replicator.launchpad_bridge.compat.courier_client import socket_of
from replicator.rpc.server.server import Server as RpcServer

_DRAIN_S = 10.0


class Server:
    """Serves functions: `Bind`, `Start`, `Stop`, `Join`.

    Handlers run in threads, as many at once as the pool has.

    Attributes:
      port: Port of this host.
      address: Address for a `courier.Client` on this host.
    """

    def __init__(
        self,
        name: str | None = None,
        port: int | None = None,
        thread_pool_size: int = 16,
    ) -> None:
        """Make a server that has a port to itself; `Start` starts it.

        Args:
          name: Name in errors and logs.
          port: Port of this host; a free one by default.
          thread_pool_size: Number of calls that run at once.

        Raises:
          AddressInUseError: The port is taken.
        """
        self._reserved = _reserved(port or 0)
        weakref.finalize(self, self._reserved.close)
        self.port: int = self._reserved.getsockname()[1]
        self.address = f"localhost:{self.port}"
        self._name = name or f"courier:{self.port}"
        self._pool_size = thread_pool_size
        # Read by threads of the server without a lock: `Bind` and `Unbind` replace
        # whole entries.
        self._functions: dict[str, Callable[..., Any]] = {}
        self._server: RpcServer | None = None

    @property
    def has_started(self) -> bool:
        """Return whether it was started."""
        return self._server is not None

    def Bind(
        self,
        method_name: str,
        py_func: Callable[..., Any],
        is_priority: bool = False,
    ) -> None:
        """Add a function for clients, or replace one at any time.

        Args:
          method_name: A public Python name, or `__call__`.
          py_func: Function to call.
          is_priority: Not used: clients are served in turn.

        Raises:
          ArgumentError: The server has started, and had no method of this name.
        """
        if self._server is not None and method_name not in self._functions:
            raise ArgumentError(
                f"`method_name` must be one that was bound before `Start`, got "
                f"{method_name!r}. Bind it before."
            )
        self._functions[method_name] = py_func

    def BindHandler(self, method_name: str, handler: Callable[..., Any]) -> None:
        """Add a function for clients: see `Bind`."""
        self.Bind(method_name, handler)

    def Unbind(self, method_name: str) -> None:
        """Raise an error in calls of a method from now on."""
        if self._server is None:
            self._functions.pop(method_name, None)
        elif method_name in self._functions:
            self._functions[method_name] = _not_found(method_name)

    def Start(self) -> None:
        """Listen, and serve.

        Raises:
          ArgumentError: It was started before, or no function is bound.
        """
        if self._server is not None:
            raise ArgumentError("Server already started. Make a new one.")
        server = RpcServer(
            name=self._name, address=socket_of(self.port), pool_size=self._pool_size
        )
        for name, function in self._functions.items():
            server.bind(name, self._routed(name, function))
        self._server = server.start()

    def Stop(self) -> None:
        """Take no more calls and answer those that run.

        Raises:
          ArgumentError: It was not started.
        """
        self._started().stop(_DRAIN_S)
        self._reserved.close()

    def Join(self) -> None:
        """Wait until it has stopped.

        Raises:
          ArgumentError: It was not started.
        """
        self._started().wait()

    def SetIsHealthy(self, is_healthy: bool) -> None:
        """Do nothing: a server is healthy while it answers."""

    def _started(self) -> RpcServer:
        if self._server is None:
            raise ArgumentError("Server not started yet. Call `Start`.")
        return self._server

    def _routed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls the current function of a name."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._functions[name](*args, **kwargs)

        call.batch_size = getattr(function, "batch_size", 1)  # type: ignore[attr-defined]
        return call


def _reserved(port: int) -> socket.socket:
    """Reserve a port of this host. Nothing listens there: clients use its socket."""
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        reserved.bind(("127.0.0.1", port))
    except OSError as error:
        reserved.close()
        raise AddressInUseError(
            f"`port` must be free on this host, got {port} ({error.strerror}). Use "
            "another one, or none: then one is found."
        ) from error
    return reserved


def _not_found(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise LookupError(f"method {name} not found")

    return refuse
