"""The controller: slices, functions and dataflows over islands, from one program.

A call looks at its arguments, traces and plans once for their shapes and places, and
puts one message into the inbox of each island that takes part, under one lock: so a
dataflow has its numbers on all of them at once, and no two of them see two dataflows in
different orders. Nothing in a call waits for data.
"""

import functools
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
from jax.sharding import PartitionSpec

from replicator.base.types import Device, PyTree
from replicator.controller.arguments import WEAK, check_leaves, copied, is_placed
from replicator.controller.dataflow import Dataflow
from replicator.controller.functions import Function
from replicator.controller.future import Future, Pending
from replicator.controller.islands.local import local_islands
from replicator.controller.islands.protocol import Island, IslandMessage, Key, Report
from replicator.controller.layouts import WHOLE
from replicator.controller.plan import plan
from replicator.controller.program import Look, Program
from replicator.controller.runs import Runs
from replicator.controller.slices import Slice, place, wish
from replicator.controller.tracing.groups import grouped
from replicator.controller.tracing.trace import OpFunction, trace
from replicator.errors import ArgumentError, check_count


class Controller:
    """Slices of islands, and the functions and dataflows that run on them.

    From `controller.local`; a context: at its end the islands finish what was called.
    """

    def __init__(self, make_islands: Callable[[Report], Mapping[str, Island]]) -> None:
        self._token = secrets.token_hex(4)
        self._tracing = threading.local()
        self._lock = threading.Lock()
        self._functions: dict[str, OpFunction] = {}
        self._slices: dict[str, Slice] = {}
        self._puts: dict[Any, Function] = {}
        self._numbers: dict[str, int] = {}
        self._runs = Runs()
        self._is_open = True
        self._islands = make_islands(self._runs.report)

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
        """Wait for what was called, and end the islands; results stay readable."""
        with self._lock:  # no message comes after it
            was_open, self._is_open = self._is_open, False
        if was_open:
            for island in self._islands.values():
                island.close()

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
        asked = wish(n, axes, kind, island, memory_bytes)
        with self._lock:
            found, places = place(
                asked, list(self._islands.values()), list(self._slices.values())
            )
            made = Slice(
                name=f"slice{len(self._slices)}",
                island=found.name,
                places=places,
                axes=asked.axes,
                memory_bytes=memory_bytes,
                devices=tuple(found.devices[at].device for at in places),
            )
            self._slices[made.name] = made
        return made

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
        leaves, structure = jax.tree.flatten(
            specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
        )
        known = slice, structure, tuple(leaves)
        if known not in self._puts:

            def put(tree: PyTree) -> PyTree:
                return tree

            self._puts[known] = self.fn(put, slice, in_specs=(specs,), out_specs=specs)
        return self._puts[known](tree)

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
        self._check_slice(slice)
        return Function(
            self, f, slice, in_specs=in_specs, out_specs=out_specs, donate=donate
        )

    def pmap(
        self,
        f: Callable[..., PyTree],
        axis_name: str | None = None,
        *,
        devices: Sequence[Device],
    ) -> Function:
        """Bind a function of one device to a slice, as `jax.pmap` did.

        Args:
          f: Function; its arguments come without the leading axis, one row a device.
          axis_name: Name of the axis in collectives: `jax.lax.psum(x, axis_name)`.
          devices: `slice.devices` or `slice.tpus`.

        Raises:
          ArgumentError: `devices` are not those of a slice.
        """
        slices = list(self._slices.values())  # another thread may add one
        found = next((each for each in slices if each.devices is devices), None)
        if found is None:
            raise ArgumentError(
                f"`devices` must be the devices of a slice, got {devices!r}. Pass "
                "`slice.devices`."
            )
        rows = PartitionSpec(tuple(found.axes))
        mapped = jax.vmap(f, axis_name=axis_name, axis_size=len(devices))
        return self.fn(functools.wraps(f)(mapped), found, in_specs=rows, out_specs=rows)

    def make_virtual_device_set(self) -> "VirtualDevices":
        """Return the object of Pathways' listing: `add_slice(tpu_devices=n).tpus`."""
        return VirtualDevices(self)

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

    # What functions, programs and dataflows need of it.

    def is_tracing(self) -> bool:
        """Return whether a dataflow is being traced in this thread."""
        return getattr(self._tracing, "now", False)

    def register(self, function: OpFunction) -> str:
        """Return the name by which equations name a function."""
        with self._lock:
            name = f"{function.label}@{len(self._functions)}.{self._token}"
            self._functions[name] = function
        return name

    def look(self, args: Sequence[PyTree]) -> tuple[list[Any], Any]:
        """Return the leaves of arguments, and what a dataflow is traced for of them.

        Raises:
          ArgumentError: A leaf is no array, or a future of another controller, or was
            donated.
        """
        given, tree = jax.tree.flatten(args)
        leaves = [leaf if is_placed(leaf) else copied(leaf) for leaf in given]
        looks = [
            self._look(leaf, is_weak=type(was) in WEAK)
            for leaf, was in zip(leaves, given, strict=True)
        ]
        return leaves, (tree, tuple(looks))

    def traced(
        self, name: str, fn: Callable[..., PyTree], signature: Any, *, fuse: bool
    ) -> Dataflow:
        """Trace and plan a function."""
        self._check_open()
        tree, looks = signature
        shapes = [
            jax.ShapeDtypeStruct(look.shape, look.dtype, weak_type=look.is_weak)
            for look in looks
        ]
        was, self._tracing.now = self.is_tracing(), True
        try:
            traced = trace(fn, jax.tree.unflatten(tree, shapes), self._functions)
        finally:
            self._tracing.now = was
        homes = [look.slice and self._slices[look.slice] for look in looks]
        groups = grouped(traced.closed, homes, self._functions, fuse=fuse)
        planned = plan(
            traced.closed,
            groups,
            self._functions,
            inputs=[
                (home, look.layout) if home is not None and look.layout else None
                for home, look in zip(homes, looks, strict=True)
            ],
            islands=self._islands,
        )
        return Dataflow(
            name,
            traced,
            groups,
            planned,
            functions=self._functions,
            signature=signature,
            run=self._submit,
            look=self.look,
        )

    def _submit(self, dataflow: Dataflow, leaves: Sequence[Any]) -> list[Future]:
        """Send each island its part of a run."""
        planned = dataflow.plan
        check_leaves(leaves, planned.donated)
        values = {
            number: leaves[at]
            for at, numbers in planned.puts.items()
            for number in numbers
        }
        futures = {number: leaves[at] for at, number in planned.inputs.items()}
        inputs: dict[int, Key] = {n: future._key for n, future in futures.items()}
        made = {held.number for held in planned.outputs} - futures.keys()
        pending = {number: Pending() for number in made}
        by_island = {
            name: [step.order for step in planned.steps if step.island == name]
            for name in dict.fromkeys(step.island for step in planned.steps)
        }

        def submit(run: int) -> None:
            with self._lock:
                self._check_open()
                # Another thread may have donated them since they were looked at.
                for future in futures.values():
                    future._check()
                messages = {
                    name: IslandMessage(
                        number=self._numbers.get(name, 0),
                        run=run,
                        orders=orders,
                        inputs=inputs,
                        values=values,
                    )
                    for name, orders in by_island.items()
                }
                try:
                    self._send(messages)
                except BaseException:
                    # Ctrl-C: islands that have theirs wait for those that have not.
                    self._send(messages)
                    raise
                for at in planned.donated:
                    leaves[at]._donated_to = dataflow.name

        taken = {number: future._pending for number, future in futures.items()}
        run = self._runs.start(planned.behind, pending, taken, submit)
        for held, aval in zip(planned.outputs, dataflow.result_shapes, strict=True):
            # A result that is an argument, or another result, is the same future.
            if held.number not in futures:
                futures[held.number] = Future(
                    island=self._islands[held.slice.island],
                    key=(run, held.number),
                    pending=pending[held.number],
                    on=held.slice,
                    layout=held.layout,
                    aval=aval,
                )
        return [futures[held.number] for held in planned.outputs]

    def _send(self, messages: Mapping[str, IslandMessage]) -> None:
        for name, message in messages.items():
            self._numbers[name] = message.number + 1
            self._islands[name].submit(message)

    def _look(self, leaf: Any, *, is_weak: bool) -> Look:
        if not isinstance(leaf, Future):
            is_weak = getattr(leaf, "weak_type", is_weak)
            return Look(tuple(leaf.shape), leaf.dtype, is_weak, None, None)
        if leaf._island is not self._islands.get(leaf.slice.island):
            raise ArgumentError(
                f"a future must be of the same `pw`, got one of another, on "
                f"{leaf.slice}. Pass its `result()`."
            )
        leaf._check()
        name, layout = leaf.slice.name, leaf._layout
        return Look(leaf.shape, leaf.dtype, leaf._is_weak, name, layout)

    def _check_slice(self, on: Slice) -> None:
        if self._slices.get(getattr(on, "name", "")) is not on:
            raise ArgumentError(
                f"`slice` must be a slice of this `pw`, got {on}. Make one by "
                "`pw.slice(n)`."
            )

    def _check_open(self) -> None:
        if not self._is_open:
            raise ArgumentError(
                "`pw` must be open, got one that was closed. Call it inside of its "
                "`with` statement."
            )


class VirtualDevices:
    """Devices that are asked for, as in Pathways' listing."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def add_slice(self, tpu_devices: int) -> Slice:
        """Return a slice: `pw.slice(tpu_devices)`."""
        return self._controller.slice(tpu_devices)


def local(*, islands: int = 1, devices: int | None = None) -> Controller:
    """Return a controller over islands in this process.

    On CPU each island has a client of XLA to itself, so that their programs run beside
    each other; elsewhere it is some of the devices that JAX sees.

    Args:
      islands: Number of islands.
      devices: Number of devices of each; by default JAX's devices are shared out.

    Raises:
      ArgumentError: There are not that many devices.

    >>> with local(islands=2, devices=1) as pw:
    ...     double = pw.fn(lambda x: x * 2, pw.slice(1))
    ...     print(double(jnp.ones(2)))
    [2. 2.]
    """
    check_count("islands", islands)
    if devices is not None:
        check_count("devices", devices)
    return Controller(lambda report: local_islands(islands, devices, report))
