"""The controller: slices, functions and dataflows over islands, from one program.

A call looks at its arguments, traces and plans once for their shapes and places, and
submits what was planned. Nothing in a call waits for data.
"""

import contextlib
import functools
import gc
import itertools
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Any, Literal

import jax
import optax
from jax.sharding import PartitionSpec

from replicator.base.types import Device, PyTree
from replicator.controller.arguments import WEAK, copied, is_placed
from replicator.controller.dataflow import Dataflow
from replicator.controller.functions import Function
from replicator.controller.future import ClientRecord
from replicator.controller.islands.protocol import Island, IslandPool, IslandReport
from replicator.controller.pipeline.pipeline import Pipeline
from replicator.controller.pipeline.schedules import Schedule
from replicator.controller.plan import plan
from replicator.controller.scheduling.clients import DataflowClient
from replicator.controller.scheduling.moves import SliceMoves
from replicator.controller.scheduling.submissions import Submissions
from replicator.controller.scheduling.timeline import Timeline
from replicator.controller.slices import (
    Slice,
    SliceDevices,
    VirtualDevices,
    Wish,
    place,
)
from replicator.controller.tracing.groups import grouped
from replicator.controller.tracing.trace import OpFunction, ops_of, trace
from replicator.errors import ArgumentError, check_positive, check_word
from replicator.strategies.strategy import Strategy


class Controller(DataflowClient):
    """Slices of islands, and the functions and dataflows that run on them.

    From `controller.local`, `start` or `connect`; a context: at its end the islands
    finish what was called. It is a client itself, "main" of weight 1, beside those that
    `client` returns.
    """

    def __init__(
        self,
        make_islands: Callable[[IslandReport], IslandPool],
        *,
        order: Literal["weight", "fifo"] = "weight",
    ) -> None:
        check_word("order", order, ("weight", "fifo"))
        self._token = secrets.token_hex(4)
        self._tracing = threading.local()
        self._lock = threading.Lock()
        self._count, self._slice_count = itertools.count(), itertools.count()
        # Functions and slices live as long as something refers to them.
        self._functions: MutableMapping[str, OpFunction]
        self._functions = weakref.WeakValueDictionary()
        self._slices: MutableMapping[str, Slice] = weakref.WeakValueDictionary()
        submissions = Submissions()
        pool = make_islands(submissions.report)
        self._islands = pool.islands
        submissions.start(self._islands, is_fifo=order == "fifo")
        self._moves = SliceMoves(pool, self._slices, self._lock, submissions)
        super().__init__(self, submissions, "main", weight=1.0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it; at once, if it is left by Ctrl-C."""
        if kind is not None and not issubclass(kind, Exception):
            self._moves.close()
            for island in self._islands.values():
                island.kill()
        self.close()

    def close(self) -> None:
        """Wait for what was called, and end the islands.

        Results on islands of this process stay readable, and others that were read.
        """
        self._moves.close()
        if self._submissions.close():
            for island in self._islands.values():
                island.close()

    def placed(self, asked: Wish) -> Slice:
        """Return a slice as it is asked for."""
        with self._lock:
            found, places = self._place(asked)
            made = Slice(
                name=f"slice{next(self._slice_count)}",
                island=found.name,
                places=places,
                axes=asked.axes,
                memory_bytes=asked.memory_bytes,
                devices=SliceDevices(found.devices[at].device for at in places),
                give_back=self._give_back,
            )
            made.devices.slice = self._slices[made.name] = made
        return made

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
        found = getattr(devices, "slice", None)
        if self._slices.get(getattr(found, "name", "")) is not found or found is None:
            raise ArgumentError(
                f"`devices` must be the devices of a slice, got {devices!r}. Pass "
                "`slice.devices`."
            )
        rows = PartitionSpec(tuple(found.axes))
        mapped = jax.vmap(f, axis_name=axis_name, axis_size=len(devices))
        return self.fn(functools.wraps(f)(mapped), found, in_specs=rows, out_specs=rows)

    def make_virtual_device_set(self) -> VirtualDevices:
        """Return the object of Pathways' listing: `add_slice(tpu_devices=n).tpus`."""
        return VirtualDevices(self.slice)

    def pipeline(
        self,
        stages: Sequence[Callable[..., PyTree]],
        loss: Callable[..., Any],
        slices: Sequence[Slice],
        microbatches: int,
        schedule: str | Schedule = "one_f_one_b",
        *,
        optimizer: optax.GradientTransformation | None = None,
        shared: Mapping[str, str] | None = None,
        strategy: Strategy | Sequence[Strategy | None] | None = None,
    ) -> Pipeline:
        """Make a pipeline: stages on slices, whose call makes one update.

        Arguments and errors are those of `controller.Pipeline`.
        """
        return Pipeline(
            self,
            stages,
            loss,
            slices,
            microbatches,
            schedule,
            optimizer=optimizer,
            shared=shared,
            strategy=strategy,
        )

    def client(self, name: str, *, weight: float = 1.0) -> DataflowClient:
        """Return a client, with functions, dataflows and futures of its own; a context.

        Clients share the islands: whose ops are next is by weight, or by who came
        first. What is called on `pw` itself is of a client "main" of weight 1.

        Args:
          name: Its name, for errors and the timeline.
          weight: Its part of the time of devices, beside the weights of the others.

        Raises:
          ArgumentError: A client has the name, or the weight is not above 0.
        """
        check_positive("weight", weight, "Use 1 for an equal share.")
        return DataflowClient(self, self._submissions, name, weight)

    def timeline(self) -> Timeline:
        """Return what ran when, where and for whom: the last 10,000 ops that ended."""
        return self._submissions.times.timeline()

    # What clients, functions, programs and dataflows need of it.

    def is_tracing(self) -> bool:
        """Return whether a dataflow is being traced in this thread."""
        return getattr(self._tracing, "made", None) is not None

    def register(self, function: OpFunction) -> str:
        """Return the name by which equations name a function."""
        with self._lock:
            name = f"{function.label}@{next(self._count)}.{self._token}"
            self._functions[name] = function
        if self.is_tracing():
            self._tracing.made.append(function)
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
            self._submissions.look(leaf, is_weak=type(was) in WEAK)
            for leaf, was in zip(leaves, given, strict=True)
        ]
        return leaves, (tree, tuple(looks))

    def traced_for(
        self,
        client: ClientRecord,
        name: str,
        fn: Callable[..., PyTree],
        signature: Any,
        *,
        fuse: bool,
    ) -> Dataflow:
        """Trace and plan a function of a client."""
        self._submissions.check_open()
        tree, looks = signature
        shapes = [
            jax.ShapeDtypeStruct(look.shape, look.dtype, weak_type=look.is_weak)
            for look in looks
        ]
        made: list[OpFunction] = []  # in the function, which may keep none of them
        was, self._tracing.made = getattr(self._tracing, "made", None), made
        try:
            traced = trace(fn, jax.tree.unflatten(tree, shapes), self._functions)
        finally:
            self._tracing.made = was
        homes = [look.slice and self._slices[look.slice] for look in looks]
        groups = grouped(traced.closed, homes, self._functions, fuse=fuse)
        make = functools.partial(
            plan,
            traced.closed,
            groups,
            self._functions,
            inputs=[
                (home, look.layout) if home is not None and look.layout else None
                for home, look in zip(homes, looks, strict=True)
            ],
            islands=self._islands,
        )
        on = {group.slice for group in groups.groups} | {*homes} - {None}
        current = functools.partial(self._moves.plan, make, on)
        return Dataflow(
            name,
            traced,
            groups,
            current(),
            functions=dict(ops_of(groups.eqns, self._functions)),
            signature=signature,
            current=current,
            run=functools.partial(self._submissions.submit, client),
            look=self.look,
        )

    def check_slice(self, on: Slice) -> None:
        """Refuse what is no slice of it, or was given back."""
        if isinstance(on, Slice):
            on.check_open("`slice`")
        if self._slices.get(getattr(on, "name", "")) is not on:
            raise ArgumentError(
                f"`slice` must be a slice of this `pw`, got {on}. Make one by "
                "`pw.slice(n)`."
            )

    def _place(self, asked: Wish) -> tuple[Island, tuple[int, ...]]:
        islands = self._moves.islands()
        with contextlib.suppress(ArgumentError):
            return place(asked, islands, list(self._slices.values()))
        # Slices that nothing refers to give their memory back.
        self._submissions.settle()
        gc.collect()
        return place(asked, islands, list(self._slices.values()))

    def _give_back(self, given: Slice) -> None:
        self._slices.pop(given.name, None)
        self._submissions.give_back(given)
