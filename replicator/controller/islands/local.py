"""Islands in this process: a PJRT client each on CPU, sub-meshes of one elsewhere.

Threads of an island: one dispatches, in the order of its inbox; one for each slice
waits for what was dispatched there. Callers put messages into the inbox, under the
controller's lock; the garbage collector puts keys to forget, in any thread, so the
inbox is a `SimpleQueue`, which takes no lock that a thread could hold when it is
collected. Only the dispatching thread changes `_values`. It waits for the shards of
other islands and for room; what it waits for was submitted before, on all islands, so
no circle can form.
"""

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from replicator.base.types import Device
from replicator.controller.islands.protocol import (
    Call,
    Computation,
    Drop,
    IslandDevice,
    IslandMessage,
    IslandReport,
    Key,
    Order,
    Receive,
    Send,
    ShardReceiver,
    process_name,
)
from replicator.controller.islands.running.compiled import compiled_for
from replicator.controller.islands.running.host_ops import (
    HostArray,
    call_on_host,
    calling_thread,
)
from replicator.controller.islands.running.placing import joined_shards, put_value
from replicator.controller.islands.waiting.arrivals import (
    ArrivedShards,
    IslandValue,
    lost_value,
)
from replicator.controller.islands.waiting.dispatched import (
    DispatchedOp,
    SliceThread,
    WaitingThread,
)
from replicator.controller.islands.waiting.outcome import (
    Outcome,
    first_error,
    wait_for_error,
)
from replicator.controller.islands.waiting.room import room_for
from replicator.controller.layouts import SliceLayout
from replicator.engine.analysis.source_lines import UNKNOWN_LINE
from replicator.engine.run_ahead import MOST_ON_CPU
from replicator.errors import IslandLostError, OpFailedError


class LocalIsland:
    """Island of this process, with its dispatching thread.

    Args:
      name: Its name.
      devices: Its devices.
      report: Called when a value is computed, or cannot be.
      peers: All processes of islands, by name; complete before the first message to
        one.
      reports_chains: Whether ops of a chain in one message are reported as they end,
        or several at once.

    Attributes:
      process: Number of this process, in the group that has the devices.
    """

    why_lost = ""  # it ends with this process
    is_here = True

    def __init__(
        self,
        name: str,
        devices: Sequence[IslandDevice],
        *,
        report: IslandReport,
        peers: Mapping[str, ShardReceiver],
        reports_chains: bool = False,
    ) -> None:
        self.name = name
        self._reports_chains = reports_chains
        self.devices = devices
        self._report = report
        self._peers = peers
        self.process = devices[0].device.client.process_index() if devices else 0
        self._compiled: weakref.WeakKeyDictionary[Computation, Callable[..., Any]]
        self._compiled = weakref.WeakKeyDictionary()
        self._inbox: queue.SimpleQueue[IslandMessage | Key | None] = queue.SimpleQueue()
        self._number = 0
        self._values: dict[Key, IslandValue] = {}
        self._arrived = ArrivedShards(process_name(name, self.process))
        self._room = room_for(MOST_ON_CPU)
        # By devices, those of the host apart: ops of a slice end in the order in which
        # they were dispatched.
        self._waiting: dict[Any, WaitingThread] = {}
        self._hosting: dict[tuple[int, ...], SliceThread[Callable[[], None]]] = {}
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def load(self, computation: Computation) -> Sequence[SliceLayout]:
        """Compile a computation; return the layouts of its outputs."""
        if computation.is_eager or computation.is_host:
            self._compiled[computation] = computation.run
            return [layout for layout in computation.outputs if layout is not None]
        compiled, layouts = compiled_for(computation, self._at(computation.places))
        self._compiled[computation] = compiled
        return layouts

    def submit(self, message: IslandMessage) -> None:
        """Take the message with the next number, and return at once."""
        self._inbox.put(message)

    def deliver(self, key: Key, sender: int | str, shards: IslandValue) -> None:
        """Take shards of another island's process, or a vote of this one's, by name."""
        self._arrived.deliver(key, sender, shards)

    def lose(self, source: str, error: BaseException) -> None:
        """Fail what would be received of an island that was lost."""
        self._arrived.lose(source, error)

    def ask(self, keys: Sequence[Key]) -> None:
        """Nothing is to be prepared: `read` finds values where they are."""

    def is_computed(self, key: Key) -> bool:
        """Return whether a value is there to be read."""
        value = self._values.get(key)
        return value is not None and value.done.done() and not value.done.exception()

    def read(self, keys: Sequence[Key]) -> list[jax.Array]:
        """Return values that were reported."""
        arrays = [self._values[key].array for key in keys]
        # Not by `_value`: whoever reports reads before the end of `done`.
        return [x.array() if isinstance(x, HostArray) else x for x in arrays]

    def drop(self, key: Key) -> None:
        """Forget a value after all messages so far; may be called in any thread."""
        self._inbox.put(key)

    def close(self) -> None:
        """End after the messages so far."""
        self._inbox.put(None)
        self._thread.join()
        for thread in (*self._hosting.values(), *self._waiting.values()):
            thread.close()

    def kill(self) -> None:
        """End at once: nothing of this process can be."""

    def _work(self) -> None:
        while (item := self._inbox.get()) is not None:
            if isinstance(item, IslandMessage):
                # One that was sent again, after Ctrl-C, has been executed.
                if item.number == self._number:
                    self._number += 1
                    for order in item.order_list.orders:
                        self._try(order, item)
            else:
                self._values.pop(item, None)
            # What it holds would live until the next message.
            del item

    def _try(self, order: Order, message: IslandMessage) -> None:
        """Execute an order; if it cannot be, fail what depends on it, and go on."""
        try:
            self._execute(order, message)
        except Exception as failure:  # the user deleted an array, or no room is left
            if isinstance(order, Drop):
                raise
            name = type(order).__name__.lower()
            if isinstance(order, Call):
                name, outputs = order.computation.name, order.outputs
            else:
                outputs = (order.output,)
            error = self._failed(name, "", failure)
            lost = lost_value(error)
            if isinstance(order, Send):
                for process in set(order.targets):
                    self._deliver(order, process, (message.run, order.output), lost)
            else:
                self._values.update({(message.run, n): lost for n in outputs})
            self._report(message.run, outputs, error)

    def _execute(self, order: Order, message: IslandMessage) -> None:
        def key(value: int) -> Key:
            return message.inputs.get(value, (message.run, value))

        if isinstance(order, Call):
            inputs = [key(value) for value in order.inputs]
            passing = message.order_list.passing if self._reports_chains else ()
            is_passing = bool(order.outputs) and order.outputs[0] in passing
            self._call(order, message.run, inputs, is_passing=is_passing)
        elif isinstance(order, Drop):
            for value in order.values:
                self._values.pop(key(value), None)
        elif isinstance(order, Send):
            self._send(order, key(order.input), key(order.output))
        elif isinstance(order, Receive):
            self._receive(order, message.run)
        else:
            put = [message.values[order.output]]
            if order.layout is not None:
                sharding = order.layout.sharding(self._at(order.places))
                put = [*put, sharding]
            name, outputs = "put", (order.output,)
            self._start(
                message.run,
                outputs,
                [],
                lambda: [[], put_value(*put)],
                places=order.places,
                name=name,
            )

    def _call(
        self, order: Call, run: int, inputs: Sequence[Key], *, is_passing: bool
    ) -> None:
        values = [self._value(key) for key in inputs]
        computation = order.computation
        done = [value.done for value in values]
        compute = self._compiled[computation]

        def dispatch() -> Sequence[Any]:
            arrays = [value.array for value in values]
            if not computation.is_host:
                return compute(*arrays)
            if computation.places not in self._hosting:
                self._hosting[computation.places] = calling_thread(self.name)
            return call_on_host(
                self._hosting[computation.places],
                compute,
                arrays,
                done,
                functools.partial(self._placed, computation),
                len(order.outputs),
            )

        self._start(
            run,
            order.outputs,
            done,
            dispatch,
            places=computation.places,
            name=computation.name,
            line=computation.line,
            is_host=computation.is_host,
            is_passing=is_passing,
        )

    def _value(self, key: Key) -> IslandValue:
        """Return a value; wait for one that a function of the host returns."""
        value = self._values[key]
        if isinstance(value.array, HostArray):
            failed = value.done.exception()
            array = None if failed else value.array.array()
            return IslandValue(array, value.done)
        return value

    def _placed(self, computation: Computation, arrays: Sequence[Any]) -> list[Any]:
        devices = self._at(computation.places)
        layouts = [each for each in computation.outputs if each is not None]
        return jax.device_put(
            list(arrays), [each.sharding(devices) for each in layouts]
        )

    def _start(
        self,
        run: int,
        outputs: Sequence[int],
        inputs: Sequence[Outcome],
        dispatch: Callable[[], Sequence[Any]],
        *,
        places: tuple[int, ...],
        name: str,
        line: str = "",
        is_host: bool = False,
        is_passing: bool = False,
    ) -> None:
        """Dispatch; another thread waits for the results and reports them."""
        op = DispatchedOp(run=run, outputs=outputs, inputs=inputs, name=name, line=line)
        op.is_passing = is_passing
        arrays: Sequence[Any] = [None] * len(outputs)
        op.error = first_error(inputs)
        self._room.get()
        if op.error is None:
            try:
                op.token, *arrays = dispatch()
            except Exception as failure:
                op.error = first_error(inputs) or self._failed(name, line, failure)
        for value, array in zip(outputs, arrays, strict=True):
            self._values[run, value] = IslandValue(array, op.done)
        if op.error is not None:
            self._settle(op)
            return
        if (places, is_host) not in self._waiting:
            thread = WaitingThread(f"{self.name}-wait", self._settle)
            self._waiting[places, is_host] = thread
        self._waiting[places, is_host].put(op)

    def _settle(self, op: DispatchedOp) -> None:
        """Wait until an op is computed, and report it."""
        found = op.error
        try:
            op.wait()
            if found is None:  # reports are in the order of what needs what
                for each in op.inputs:
                    each.exception()
        except Exception as failure:
            # An op runs when its inputs are computed: it failed by itself, or one
            # of them did, and the first that failed is to be named.
            found = wait_for_error(op.inputs)
            found = found or self._failed(op.name, op.line, failure)
        self._room.put(None)
        self._report(op.run, op.outputs, found)
        op.done.end(found)

    def _failed(self, name: str, line: str, failure: Exception) -> OpFailedError:
        text = str(failure).strip() or type(failure).__name__
        # What a callback raised stands last in the text of XLA's error.
        text = text.splitlines()[-1 if "Traceback" in text else 0]
        where = f" ({line})" if line not in ("", UNKNOWN_LINE) else ""
        # Its collectives fail when another process of the island died: the first sign.
        is_torn = len({each.process for each in self.devices}) > 1 and "Gloo" in text
        kind = IslandLostError if is_torn else OpFailedError
        error = kind(f"op `{name}` on {self.name} failed{where}: {text}")
        error.op, error.island, error.line = name, self.name, line
        error.__cause__ = failure
        return error

    def _send(self, order: Send, key: Key, sent: Key) -> None:
        value, devices = self._value(key), self._at(order.places)
        here = self._here(order.places)
        for process in dict.fromkeys(order.targets):
            sources = [
                source
                for source, target in zip(order.sources, order.targets, strict=True)
                if target == process and source in here
            ]
            if not sources:  # another process of this island has them
                continue
            shards = None
            if value.array is not None:
                held = {at.device: at.data for at in value.array.addressable_shards}
                shards = [held[devices[number]] for number in sources]
                if order.is_kept:
                    # A later run may donate it before these have arrived.
                    places = [SingleDeviceSharding(devices[n]) for n in sources]
                    shards = jax.device_put(shards, places, may_alias=False)
            self._deliver(order, process, sent, IslandValue(shards, value.done))

    def _deliver(
        self, order: Send, process: int, sent: Key, shards: IslandValue
    ) -> None:
        peer = self._peers[process_name(order.target, process)]
        peer.deliver(sent, self.process, shards)

    def _receive(self, order: Receive, run: int) -> None:
        key = run, order.output
        senders = [order.senders[n] for n in self._here(order.places)]
        others = {self.devices[at].process for at in order.places} - {self.process}
        names = [process_name(self.name, number) for number in sorted(others)]
        fellows = {name: self._peers[name] for name in names}
        value = self._arrived.take(order.source, key, senders, fellows)
        error = first_error([value.done])
        if error is not None:
            self._report(run, (order.output,), error)
        array = value.array
        if array is not None:
            devices = self._at(order.places)
            here = [devices[number] for number in self._here(order.places)]
            sharding = order.layout.sharding(devices)
            array = joined_shards(array, here, order.shape, sharding)
        self._values[key] = IslandValue(array, value.done)

    def _here(self, places: Sequence[int]) -> list[int]:
        """Return which of some devices are of this process."""
        return [
            n for n, at in enumerate(places) if self.devices[at].process == self.process
        ]

    def _at(self, places: Sequence[int]) -> list[Device]:
        return [self.devices[at].device for at in places]
