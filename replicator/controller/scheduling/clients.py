"""Clients: each with functions, dataflows and futures of its own, and a weight."""

import functools
from collections.abc import Callable, Mapping, Sequence
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
from replicator.controller.scheduling.submissions import Submissions
from replicator.controller.slices import Slice, Wish, wish
from replicator.controller.tracing.trace import OpFunction


class ClientHost(Protocol):
    """What a client needs of its controller."""

    def placed(self, asked: Wish) -> Slice:
        """Return a slice as it is asked for."""
        ...

    def is_tracing(self) -> bool:
        """Return whether a dataflow is being traced in this thread."""
        ...

    def register(self, function: OpFunction) -> str:
        """Return the name by which equations name a function."""
        ...

    def look(self, args: Sequence[PyTree]) -> tuple[list[Any], Any]:
        """Return the leaves of arguments, and what a dataflow is traced for of them."""
        ...

    def check_slice(self, on: Slice) -> None:
        """Refuse what is no slice of it."""
        ...

    def traced_for(
        self, client: ClientRecord, name: str, fn: Any, signature: Any, *, fuse: bool
    ) -> Dataflow:
        """Trace and plan a function of a client."""
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
        self, host: ClientHost, submissions: Submissions, name: str, weight: float
    ) -> None:
        self.name = name
        self._host = host
        self._submissions = submissions
        self._record = submissions.join(name, weight)

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Leave: free what it holds, and refuse its futures."""
        self._submissions.leave(self._record)

    def slice(
        self,
        n: int = 1,
        *,
        axes: Mapping[str, int] | None = None,
        kind: str | None = None,
        island: str | None = None,
        memory_bytes: int = 0,
    ) -> Slice:
        """Return devices of one island, those that have the fewest slices.

        Any client may use them.

        Args:
          n: Number of devices.
          axes: Name and size of each axis of their mesh; one axis, "devices", by
            default.
          kind: Kind of device, as JAX names it.
          island: Name of the island: "island0".
          memory_bytes: Memory of each device that is kept for it.

        Raises:
          ArgumentError: No island can have it; the message says which wish fails.
        """
        return self._host.placed(wish(n, axes, kind, island, memory_bytes))

    def fn(
        self,
        f: Callable[..., PyTree],
        slice: Slice,  # noqa: A002
        in_specs: PyTree = None,
        out_specs: PyTree = None,
        donate: int | Sequence[int] = (),
    ) -> Function:
        """Bind a function to a slice.

        Args:
          f: Function of trees of arrays.
          slice: Where it runs.
          in_specs: Partition specs of the arguments, as of `jax.jit`'s `in_shardings`:
            one for all, or a tuple with one, or a tree, for each. By default arguments
            of the slice stay as they are, and others are whole on each device.
          out_specs: Likewise of the results; by default XLA chooses.
          donate: Positions of arguments whose memory it may take.
        """
        self._host.check_slice(slice)
        return Function(
            self, f, slice, in_specs=in_specs, out_specs=out_specs, donate=donate
        )

    def host(
        self,
        f: Callable[..., PyTree],
        slice: Slice,  # noqa: A002
        result: PyTree,
    ) -> Function:
        """Bind a function of the host to a slice: an op of Python beside its devices.

        It takes and returns arrays of NumPy, and may have effects: an environment's
        step, a file. Calls on a slice run one after the other in their order, each
        once, also if nobody takes what it returns, and beside what the devices do. On
        an island that is a process, what it holds is pickled once, and lives there.

        Args:
          f: Function of trees of arrays.
          slice: Where its arguments come from, and its results go to: whole on each
            device.
          result: What it returns: a `jax.ShapeDtypeStruct` for each array.

        Raises:
          ArgumentError: `result` is no tree of shapes and dtypes.

        >>> with controller.local(islands=1, devices=1) as pw:
        ...     count = pw.host(np.size, pw.slice(1), jax.ShapeDtypeStruct((), int))
        ...     print(count(jnp.ones(3)))
        3
        """
        self._host.check_slice(slice)
        return Function(self, f, slice, is_host=True, host_result=result)

    def program(
        self, fn: Callable[..., PyTree] | None = None, *, fuse: bool = True
    ) -> Any:
        """Make a function that calls many ops one dataflow; a decorator.

        Args:
          fn: The function; `jax.grad`, `jax.vmap` in it, or `pw.program(jax.grad(f))`.
          fuse: Whether neighbours on a slice become one computation.

        Returns:
          A `Program`: a call runs it, `dataflow` returns what would run.
        """
        if fn is None:
            return functools.partial(self.program, fuse=fuse)
        return Program(self, fn, fuse=fuse)

    def put(
        self,
        tree: PyTree,
        slice: Slice,  # noqa: A002
        specs: PyTree = None,
    ) -> PyTree:
        """Place arrays on a slice; return futures at once.

        Args:
          tree: Arrays of NumPy or JAX, or futures of other slices.
          slice: The slice.
          specs: A partition spec for each, or a prefix of the tree; whole by default.
        """
        specs = WHOLE if specs is None else specs
        return self._placed(tree, slice, specs)

    def copy(
        self,
        state: PyTree,
        slice: Slice,  # noqa: A002
        specs: PyTree = None,
    ) -> PyTree:
        """Copy futures to a slice of any island; return futures at once.

        All leaves are of the step that made them, whatever ops donate them later: a
        call that donates comes after the copy. Copies of later calls are never older.

        Args:
          state: Futures, or arrays.
          slice: The slice; that where they are gets arrays of its own, too.
          specs: A partition spec for each, or a prefix of the tree; by default as they
            are, where the slice has the same axes, and else whole on each device.
        """
        return self._placed(state, slice, specs)

    # What functions and programs need of it.

    def is_tracing(self) -> bool:
        """Return whether a dataflow is being traced in this thread."""
        return self._host.is_tracing()

    def register(self, function: OpFunction) -> str:
        """Return the name by which equations name a function."""
        return self._host.register(function)

    def look(self, args: Sequence[PyTree]) -> tuple[list[Any], Any]:
        """Return the leaves of arguments, and what a dataflow is traced for of them."""
        return self._host.look(args)

    def traced(
        self, name: str, fn: Callable[..., PyTree], signature: Any, *, fuse: bool
    ) -> Dataflow:
        """Trace and plan a function."""
        return self._host.traced_for(self._record, name, fn, signature, fuse=fuse)

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
