"""Nodes with an object whose methods other nodes call, and their handles.

`CourierNode(Learner, ...)` makes a `Learner` in its worker and serves the public
methods that its class declares, in threads of their own. The object's `run()`, if it
has one, is the node's work, and the server stops when it returns; without it the node
serves until the program stops.
"""

import datetime
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic

from replicator.errors import ProgramError, check_not_async
from replicator.launchpad_bridge.addresses.promises import Address, RpcAddress
from replicator.launchpad_bridge.handles import Handle
from replicator.launchpad_bridge.nodes.courier_server import CourierServer
from replicator.launchpad_bridge.nodes.py_node import PyClassNode, Worked
from replicator.launchpad_bridge.running import node_context
from replicator.launchpad_bridge.running.node_context import (
    RunningContext,
    loose_context,
)
from replicator.launchpad_bridge.running.stopping import stop_event
from replicator.rpc.client.client import DEFAULT_TIMEOUT_S, Client, fail_fast
from replicator.rpc.security.secret import Secret
from replicator.rpc.server.methods import (
    Method,
    declared_names,
    idempotent,
    methods_of,
)
from replicator.rpc.server.server import Server, listen_at
from replicator.rpc.transports.connect import listen

_HAND_OVER = "set_courier_server"
_POOL_SIZE = 16
_DRAIN_S = 10.0
_DRAIN_WHEN_STOPPING_S = 1.0
# Launchpad's options of gRPC, accepted and ignored.
_UNUSED = {"compress", "chunk_tensors", "load_balancing_policy", "propagate_deadline"}
_OF_CLIENT = {"call_timeout", "timeout_s", "wait_for_ready", "heartbeat_s"}
_OF_SERVER = {"thread_pool_size", "pool_size", "port", "name"}


class CourierHandle(Handle[Client]):
    """The handle of a `CourierNode`: becomes a client of its methods."""

    def __init__(self, address: Address, **kwargs: Any) -> None:
        """Make a handle.

        Args:
          address: Address of the node's server.
          **kwargs: See `set_client_kwargs`.
        """
        self._address = address
        self._kwargs = _checked("courier_client_kwargs", kwargs, _OF_CLIENT | _UNUSED)

    def set_client_kwargs(self, **kwargs: Any) -> None:
        """Set options of clients.

        Args:
          **kwargs: `call_timeout`, the deadline of each call (seconds or a `timedelta`;
            None or 0 for none; 60 s by default); `wait_for_ready`, whether calls wait
            for a server that does not listen yet.

        Raises:
          ProgramError: One of them is unknown.
        """
        self._kwargs = _checked("courier_client_kwargs", kwargs, _OF_CLIENT | _UNUSED)

    def dereference(self) -> Client:
        """Return a client; it connects at its first call.

        Raises:
          LaunchError: The program was not launched, or is over.
        """
        context = node_context.current()
        builder = self._address.builder
        exchange = builder.exchange if context is None else context.exchange
        make = Client if exchange is None else exchange.client
        options = client_options_of_courier(self._kwargs)
        if exchange is None and context is not None:
            options["name"] = context.worker  # for the statistics of edges
        # On several hosts a server is found when it is called, not before.
        client = make(**{**builder.client_options(), **options})
        if context is None:
            builder.close_with_run(client)
        else:
            context.root.when_over(client.close)
            if isinstance(client, Client):
                # A server that has stopped before its callers is not started again.
                context.stop_event.when_set(partial(fail_fast, client))
        return client

    def __getattr__(self, name: str) -> Any:
        # Looked up by `copy` and `pickle` before there is an address.
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"A handle has no methods of its node, got `{name}`. It becomes a client "
            "where a node that has it as an argument starts; elsewhere call "
            f"`handle.dereference().{name}(...)` once the program is launched."
        )


class CourierNode(PyClassNode[CourierHandle, Worked], Generic[Worked]):
    """Makes an object in its worker, and lets others call its methods.

    Attributes:
      courier_address: Address of the server.

    >>> learner = program.add_node(lp.CourierNode(Learner, seed=7), label="learner")
    >>> act = lp.PyNode(lambda learner: learner.step(), learner)     # calls it
    >>> actor = program.add_node(act, label="actor")
    >>> with lp.launch(program) as run:
    ...     run.wait(labels=["actor"])
    >>> run.results["actor"]
    7
    """

    def __init__(
        self,
        constructor: Callable[..., Worked],
        *args: Any,
        courier_kwargs: Mapping[str, Any] | None = None,
        courier_client_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Store the constructor, its arguments and the options.

        Args:
          constructor: A class, or a function that returns an object; runs in the node.
          *args: Its arguments, which may hold handles and `Deferred`s, nested.
          courier_kwargs: Options of the server: `thread_pool_size`, the number of calls
            that run at once (16, or `thread_pool_size` of the object's class); `port`,
            to listen on with gRPC as well, on this host only.
          courier_client_kwargs: Options of clients: `CourierHandle.set_client_kwargs`.
          **kwargs: Named arguments of the constructor.

        Raises:
          ProgramError: An option is unknown.
          ArgumentError: The class declares a public `async def`.
        """
        super().__init__(constructor, *args, **kwargs)
        if isinstance(constructor, type):
            for name in declared_names(constructor):
                check_not_async(name, getattr(constructor, name))
        self.courier_address = RpcAddress("courier")
        self.allocate_address(self.courier_address)
        self._courier_kwargs = _checked("courier_kwargs", courier_kwargs, _OF_SERVER)
        self._client_kwargs = _checked(
            "courier_client_kwargs", courier_client_kwargs, _OF_CLIENT | _UNUSED
        )

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Give the constructor its arguments now: for nodes that need each other.

            foo_node, bar_node = lp.CourierNode(Foo), lp.CourierNode(Bar)
            foo_node.configure(bar=bar_node.create_handle())
            bar_node.configure(foo=foo_node.create_handle())

        Args:
          *args: Replace the arguments of the constructor.
          **kwargs: Replace its named arguments.
        """
        self._args = args
        self._kwargs = kwargs
        self.is_configured = True
        self.collect_input_handles()

    def create_handle(self) -> CourierHandle:
        """Return a handle, which becomes a client of the object's methods."""
        handle = CourierHandle(self.courier_address, **self._client_kwargs)
        return self._track_handle(handle)

    def run(self) -> Any:
        """Make the object, serve it, call its `run()`; return the result."""
        instance = self._construct_instance()
        server = self._make_server(instance)
        if hasattr(instance, _HAND_OVER):
            return self._hand_over(instance, server)
        server.start()
        self.courier_address.builder.publish(server.address)
        is_well = False
        try:
            result = instance.run() if self._runs(instance) else stop_event().wait()
            is_well = True
        finally:
            most_s = getattr(type(instance), "drain_s", _DRAIN_S)
            server.stop(_drain_s(is_well, most_s))
        return result if self._runs(instance) else None

    def methods(self, instance: Any) -> list[Method]:
        """Return the methods for clients: the public ones that the class declares."""
        if not any(declared_names(type(instance))):  # the node only runs
            return []
        offered = methods_of(instance)
        return [method for name, method in offered.items() if name != _HAND_OVER]

    def _make_server(self, instance: Any) -> CourierServer:
        context = node_context.of_thread() or loose_context()
        # A class whose handlers wait for each other sets the number that run at once.
        pool_size = getattr(type(instance), "thread_pool_size", _POOL_SIZE)
        server = CourierServer(lambda methods: self._serve(methods, context, pool_size))
        for method in self.methods(instance):
            server.bind(method.name, _in_context(method, context))
        return server

    def _serve(
        self,
        methods: Mapping[str, Callable[..., Any]],
        context: RunningContext,
        pool_size: int,
    ) -> Any:
        """Start a server: of `rpc`, or of the launcher's exchange."""
        options = dict(self._courier_kwargs)
        builder = self.courier_address.builder
        address, here = builder.listening(), builder.server_options()
        name = options.pop("name", context.worker)
        if context.exchange is not None:
            return context.exchange.serve(name, address, methods)
        if (port := options.pop("port", None)) is not None:
            here.setdefault("secret", _secret_beside(address))
            address = f"{address},grpc://127.0.0.1:{port}"
        # Otherwise a handler would hold the objects of its caller themselves.
        encodes = None if context.by_reference else True
        server = Server(
            name=name,
            pool_size=options.pop(
                "thread_pool_size", options.pop("pool_size", pool_size)
            ),
            listeners=listen_at(
                address, partial(listen, force_encoding=encodes, **here)
            ),
        )
        for method, function in methods.items():
            server.bind(method, function)
        return server.start()

    def _hand_over(self, instance: Any, server: CourierServer) -> Any:
        """Give the server to the object, which starts and stops it."""
        instance.set_courier_server(server)
        try:
            return instance.run() if self._runs(instance) else None
        finally:
            server.stop(_DRAIN_WHEN_STOPPING_S)


def client_options_of_courier(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `rpc.Client` for those of Launchpad's `courier.Client`.

    >>> client_options_of_courier({"call_timeout": datetime.timedelta(seconds=5)})
    {'timeout_s': 5.0}
    """
    options = {k: v for k, v in kwargs.items() if k not in _UNUSED | {"call_timeout"}}
    if "call_timeout" in kwargs:
        seconds = kwargs["call_timeout"]
        if isinstance(seconds, datetime.timedelta):
            seconds = seconds.total_seconds()
        options["timeout_s"] = seconds or None
    return {"timeout_s": DEFAULT_TIMEOUT_S, **options}


def _drain_s(is_well: bool, most_s: float) -> float:
    """Return the time for calls to finish: short if the whole program ends."""
    context = node_context.current()
    if not is_well:
        return 0.0
    is_stopping = context is None or context.stop_event.is_set()
    return min(_DRAIN_WHEN_STOPPING_S, most_s) if is_stopping else most_s


def _secret_beside(address: str) -> Secret | None:
    for part in address.split(","):
        if part.startswith("unix:"):
            return Secret.read(os.path.join(os.path.dirname(part[5:]), "secret"))
    return None


def _in_context(method: Method, context: RunningContext) -> Callable[..., Any]:
    """Return a method that runs in its node's context, in threads of the server."""
    function = method.function
    serve: Any = context.applied_to(function)
    serve.batch_size = getattr(function, "batch_size", 1)
    return idempotent(serve) if method.is_idempotent else serve


def _checked(
    argument: str, options: Mapping[str, Any] | None, known: set[str]
) -> dict[str, Any]:
    options = dict(options or {})
    unknown = sorted(set(options) - known)
    if unknown:
        raise ProgramError(
            f"`{argument}` must be of {', '.join(sorted(known))}, got "
            f"{', '.join(unknown)}. Use one of these."
        )
    return options
