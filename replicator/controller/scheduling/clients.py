"""Clients: each with functions, dataflows and futures of its own, and a weight."""

import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from replicator.base.types import PyTree
from replicator.controller.dataflow import Dataflow
from replicator.controller.functions import Function
from replicator.controller.future import ClientRecord, Future
from replicator.controller.layouts import WHOLE
from replicator.controller.program import Program
from replicator.controller.slices import Slice
from replicator.controller.tracing.trace import OpFunction

Submit = Callable[[ClientRecord, Dataflow, Sequence[Any]], list[Future]]


class ClientHost(Protocol):
    """What a client needs of its controller."""

    def is_tracing(self) -> bool:
        """Return whether a dataflow is being traced in this thread."""
        ...

    def register(self, function: OpFunction) -> str:
        """Return the name by which equations name a function."""
        ...

    def look(self, args: Sequence[PyTree]) -> tuple[list[Any], Any]:
        """Return the leaves of arguments, and what a dataflow is traced for of them."""
        ...

    def traced_for(
        self,
        client: ClientRecord,
        name: str,
        fn: Callable[..., PyTree],
        signature: Any,
        *,
        fuse: bool,
    ) -> Dataflow:
        """Trace and plan a function."""
        ...

    def check_slice(self, on: Slice) -> None:
        """Refuse what is no slice of it."""
        ...

    @property
    def slice(self) -> Callable[..., Slice]:
        """Return devices of one island."""
        ...


class DataflowClient:
    """One of those that share the islands, from `pw.client`; a context.

    What it calls waits in a queue of its own, and has its share of the devices' time by
    its weight. At the end of the context, or of `close`, what it holds is freed, what
    has not started is cancelled, and its futures are refused.

    Attributes:
      name: Its name.
    """

    def __init__(
        self,
        host: ClientHost,
        record: ClientRecord,
        leave: Callable[[ClientRecord], None],
    ) -> None:
        self.name = record.name
        self._host = host
        self._record = record
        self._leave = leave
        self.is_tracing = host.is_tracing
        self.register = host.register
        self.look = host.look
        self.traced = functools.partial(host.traced_for, record)

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave."""
        self.close()

    def close(self) -> None:
        """Leave: free what it holds, and refuse its futures."""
        if not self._record.has_left:
            self._leave(self._record)

    def slice(self, n: int = 1, **options: Any) -> Slice:
        """Return devices of one island, as `pw.slice`; any client may use them."""
        return self._host.slice(n, **options)

    def fn(
        self,
        f: Callable[..., PyTree],
        slice: Slice,  # noqa: A002
        in_specs: PyTree = None,
        out_specs: PyTree = None,
        donate: int | Sequence[int] = (),
    ) -> Function:
        """Bind a function to a slice, as `pw.fn`; calls of it are the client's."""
        self._host.check_slice(slice)
        return Function(
            self, f, slice, in_specs=in_specs, out_specs=out_specs, donate=donate
        )

    def program(
        self, fn: Callable[..., PyTree] | None = None, *, fuse: bool = True
    ) -> Any:
        """Make a function one dataflow of the client, as `pw.program`."""
        if fn is None:
            return functools.partial(self.program, fuse=fuse)
        return Program(self, fn, fuse=fuse)

    def put(
        self,
        tree: PyTree,
        slice: Slice,  # noqa: A002
        specs: PyTree = None,
    ) -> PyTree:
        """Place arrays on a slice, as `pw.put`; the futures are the client's."""
        specs = WHOLE if specs is None else specs
        return self._placed(tree, slice, specs)

    def copy(
        self,
        state: PyTree,
        slice: Slice,  # noqa: A002
        specs: PyTree = None,
    ) -> PyTree:
        """Copy arrays to a slice, as `pw.copy`; the futures are the client's."""
        return self._placed(state, slice, specs)

    def _placed(self, tree: PyTree, on: Slice, specs: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(specs, is_leaf=_is_spec)
        is_host = not any(isinstance(leaf, Future) for leaf in jax.tree.leaves(tree))
        known = self._record.number, structure, tuple(leaves), is_host
        if known not in on.puts:
            # Without `jnp.copy` a result may be the argument's array.
            def put(tree: PyTree) -> PyTree:
                return jax.tree.map(jnp.copy, tree)

            in_specs = None if specs is None else (specs,)
            # What comes from the host is its own: not twice in memory.
            donate = (0,) if is_host and specs is not None else ()
            on.puts[known] = self.fn(put, on, in_specs, specs, donate)
        return on.puts[known](tree)


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)
