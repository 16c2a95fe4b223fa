"""An island in another process, as its controller has it.

Two threads for each: one sends what is queued, all that waits in one message, and the
next when that was taken; one asks for reports, in a call that the island answers when
there are some. That call ends when the island dies, and is late when it is stopped:
then the island is lost, and all that it has not reported fails by name.

The queue is a `SimpleQueue`, as the garbage collector puts keys to forget, in any
thread.
"""

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from replicator.controller.islands.exports import (
    NotExportableError,
    computation_data,
    exported,
    recipe_of,
)
from replicator.controller.islands.protocol import (
    Computation,
    IslandDevice,
    IslandMessage,
    IslandReport,
    Key,
    lost_with,
)
from replicator.controller.islands.running.host_run import HostRun
from replicator.controller.islands.wire import (
    Data,
    array_on_device,
    error_data,
    error_from,
    keys_data,
    layout_from,
    order_data,
    values_data,
)
from replicator.controller.layouts import SliceLayout
from replicator.errors import (
    ArgumentError,
    CallTimeoutError,
    ConnectionLostError,
    DecodeError,
    EncodeError,
    IslandLostError,
    MessageTooLargeError,
    RemoteError,
    RpcError,
    ServerStoppedError,
)
from replicator.rpc.client.client import Client

_BEATS = 4
"""How often an island without news answers, in the time after which it is lost."""


_EXIT_S = 2.0
"""How long the process of an island whose connection ended may take to exit."""


class IslandParent(Protocol):
    """The process of an island, to the process that started it."""

    def send_recipe(self, number: int, recipe: bytes) -> None:
        """Send a recipe over the pipe."""
        ...

    def end(self, wait_s: float = 0.0) -> str:
        """End it; return how it ended by itself, or "" if this ended it."""
        ...


class RemoteIsland:
    """Island of another process; it has joined the session.

    Args:
      name: Its name.
      devices: Its devices; those of JAX are in this process, for traces alone.
      client: Client of its process.
      session: Token of the controller's session.
      platform: What computations are compiled for there.
      report: Called when a value is computed, or cannot be.
      lost_after_s: Silence after which it is lost.
      lost: Called with its name and an error when it is lost.
      parent: Its process, if this one started it.

    Attributes:
      why_lost: How it was lost; "" while it is there.
    """

    is_here = False

    def __init__(
        self,
        name: str,
        devices: Sequence[IslandDevice],
        *,
        client: Client,
        session: str,
        platform: str,
        report: IslandReport,
        lost_after_s: float,
        lost: Callable[[str, BaseException], None],
        parent: IslandParent | None = None,
    ) -> None:
        self.name = name
        self.devices = devices
        self._client = client
        self._session = session
        self._platform = platform
        self._report = report
        self._lost_after_s = lost_after_s
        self._tell_lost = lost
        self._parent = parent
        self._numbers = itertools.count()
        # By computation and list, the number that the island knows it by.
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._hosts: weakref.WeakSet[Any] = weakref.WeakSet()  # functions sent there
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._read: dict[Key, jax.Array] = {}
        # Values that were asked for; None until they came.
        self._asked: dict[Key, Data | None] = {}
        # By run, the values that it has not reported, with the names of their ops.
        self._open: dict[int, dict[int, str]] = {}
        self._is_closed = False
        self.why_lost = ""
        self._lock = threading.Lock()  # guards these four
        self._losing = threading.Lock()  # who finds it lost waits for who did before
        self._threads = [
            threading.Thread(target=work, name=f"{name}-{what}", daemon=True)
            for what, work in (("send", self._send_all), ("hear", self._hear_all))
        ]
        for thread in self._threads:
            thread.start()

    def load(self, computation: Computation) -> Sequence[SliceLayout]:
        """Compile a computation there; return the layouts of its outputs."""
        return self.load_program(computation, self.program(computation))

    def program(self, computation: Computation) -> bytes | NotExportableError:
        """Return a computation as it is sent, or why it must be a recipe."""
        if self.why_lost:
            raise self._failed(computation.name, "")
        devices = computation.traced_on or [
            self.devices[at].device for at in computation.places
        ]
        try:
            return exported(computation, devices, self._platform)
        except NotExportableError as error:
            return error

    def load_program(
        self, computation: Computation, program: bytes | NotExportableError
    ) -> Sequence[SliceLayout]:
        """Compile what `program` returned; return the layouts of its outputs."""
        number = next(self._numbers)
        if isinstance(program, NotExportableError):
            self._send_recipe(number, computation, program)
            program = b""
        about = computation_data(computation)
        found = self._called("load", self._session, number, about, program)
        self._known[computation] = number
        weakref.finalize(
            computation, self._outbox.put, ["forget_computation", number]
        ).atexit = False
        if (
            isinstance(computation.run, HostRun)
            and (host := computation.run.function) not in self._hosts
        ):
            self._hosts.add(host)
            forget = ["forget_function", host.token]
            weakref.finalize(host, self._outbox.put, forget).atexit = False
        layouts = [layout_from(each) for each in found]
        return [layout for layout in layouts if layout is not None]

    def submit(self, message: IslandMessage) -> None:
        """Take the message with the next number, and return at once."""
        if outputs := message.order_list.outputs:  # it may send alone
            with self._lock:
                self._open.setdefault(message.run, dict(outputs))
        self._outbox.put(message)

    def ask(self, keys: Sequence[Key]) -> None:
        """Have values that one call will read come with the report of the last."""
        with self._lock:
            keys = [key for key in keys if key not in self._asked]
            self._asked.update(dict.fromkeys(keys))
        if keys:
            self._outbox.put(["ask", [list(key) for key in keys]])

    def read(self, keys: Sequence[Key]) -> list[jax.Array]:
        """Return values that were reported; each is fetched once."""
        with self._lock:
            came = {k: d for k in keys if (d := self._asked.pop(k, None)) is not None}
        self._read.update({key: array_on_device(data) for key, data in came.items()})
        missing = [key for key in keys if key not in self._read]
        if missing and self._is_closed:
            raise ArgumentError(
                f"`pw` must be open to read what was not read before of {self.name}, "
                "got one that was closed. Read it inside of its `with` statement."
            )
        if missing and self.why_lost:
            raise lost_with(self)
        if missing:
            found = self._called("read", self._session, missing)
            self._read.update(zip(missing, map(array_on_device, found), strict=True))
        return [self._read[key] for key in keys]

    def drop(self, key: Key) -> None:
        """Forget a value after all messages so far; may be called in any thread."""
        with self._lock:
            self._asked.pop(key, None)
        self._read.pop(key, None)
        self._outbox.put(["drop", *key])

    def lose(self, source: str, error: BaseException) -> None:
        """Fail what would be received of an island that was lost."""
        self._outbox.put(["lost", source, error_data(error)])

    def meet(self, name: str, address: str) -> None:
        """Tell it of an island that joined, before what is sent there."""
        self._outbox.put(["peer", name, address])

    def close(self) -> None:
        """End after the messages so far."""
        self.leave()
        self.end()

    def leave(self) -> None:
        """Have the island end after the messages so far; its process stays."""
        self._is_closed = True
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()

    def kill(self) -> None:
        """End it at once: after Ctrl-C."""
        if self._parent is not None:
            self._parent.end()
        self.give_up(RpcError("the controller was left"))

    def give_up(self, error: Exception) -> None:
        """Give it up: end it, and fail what it has not reported."""
        with self._losing:
            if self.why_lost:
                return
            # One that is stopped does not exit.
            how = self.end(0.0 if isinstance(error, CallTimeoutError) else _EXIT_S)
            with self._lock:
                self.why_lost = f"which {how}" if how else _text(error)
            self._tell_lost(self.name, self._failed("its transfers", ""))
            with self._lock:
                runs = list(self._open)
            self._fail(runs)

    def end(self, wait_s: float = 0.0) -> str:
        """End its process; return how that ended by itself, or ""."""
        self._client.close()
        return "" if self._parent is None else self._parent.end(wait_s)

    def _send_recipe(
        self, number: int, computation: Computation, why: NotExportableError
    ) -> None:
        if self._parent is None:
            raise ArgumentError(
                f"op `{computation.name}` must be one that `jax.export` takes to run "
                f"on {self.name}, got one that it does not at {computation.line}: "
                f"{why}. Use `controller.start`, which takes callbacks, or "
                "`controller.local`."
            ) from why
        try:
            self._parent.send_recipe(number, recipe_of(computation))
        except NotExportableError as error:
            raise ArgumentError(
                f"op `{computation.name}` must call back functions that can be "
                f"pickled, got one that cannot at {computation.line}: {error}. Use "
                "`controller.local`, or make what it holds in the function."
            ) from error

    def _called(self, method: str, *args: Any) -> Any:
        """Make a call, and wait for it; a lost island raises by name."""
        try:
            return self._client.call(method, args)
        except (RemoteError, EncodeError, DecodeError, MessageTooLargeError):
            raise
        except RpcError as error:
            self.give_up(error)
            raise self._failed(method, "") from error

    def _send_all(self) -> None:
        """Send what is queued, until the end."""
        number = 0
        while self._send_next(number):
            number += 1

    def _send_next(self, number: int) -> bool:
        """Send what is queued, once there is something; return whether more follows.

        The arrays that it sent are not kept until the next message.
        """
        items = [self._outbox.get()]
        while not self._outbox.empty():
            items.append(self._outbox.get())
        ended = None in items
        items = items[: items.index(None)] if ended else items
        runs = [each.run for each in items if isinstance(each, IslandMessage)]
        try:
            if not self.why_lost:
                data = [part for each in items for part in self._data(each)]
                self._client.call("take", (self._session, number, data))
                if ended:
                    self._client.call("leave", (self._session,))
        except Exception as error:  # it is not known what has arrived
            self.give_up(error)
        if self.why_lost:
            self._fail(runs)
        return not ended

    def _data(self, item: IslandMessage | list[Any]) -> list[Data]:
        if isinstance(item, list):
            return [item]
        orders, made = item.order_list, []
        if orders not in self._known:
            number = self._known[orders] = next(self._numbers)
            forget = ["forget_orders", number]
            weakref.finalize(orders, self._outbox.put, forget).atexit = False
            listed = [order_data(e, self._known.__getitem__) for e in orders.orders]
            made = [["orders", number, listed]]
        keys, values = keys_data(item.inputs), values_data(item.values)
        run = ["run", item.number, item.run, self._known[orders], keys, values]
        return [*made, run]

    def _hear_all(self) -> None:
        """Ask for reports, until the end."""
        ended, wait_s = False, self._lost_after_s / _BEATS
        while not ended and not self.why_lost:
            try:
                ended, reports, answers = self._client.call(
                    "reports", (self._session, wait_s), timeout_s=self._lost_after_s
                )
            except Exception as error:
                self.give_up(error)
                return
            for keys, arrays in answers:
                self._came([tuple(key) for key in keys], arrays)
            with self._lock:
                if self.why_lost:  # all that was left was failed, or will be
                    return
                for run, values, *_ in reports:
                    left = self._open.get(run, {})
                    for value in values:
                        left.pop(value, None)
                    if not left:
                        self._open.pop(run, None)
            for run, values, error, age_s in reports:
                self._report(run, values, error_from(error), age_s)
        if not self._is_closed:
            self.give_up(ServerStoppedError("it was stopped"))

    def _came(self, keys: Sequence[Key], arrays: Sequence[Data]) -> None:
        with self._lock:
            for key, data in zip(keys, arrays, strict=True):
                if key in self._asked:  # not dropped meanwhile
                    self._asked[key] = data

    def _fail(self, runs: Sequence[int]) -> None:
        for run in runs:
            with self._lock:
                left = self._open.pop(run, {})
            for value, name in left.items():
                self._report(run, [value], self._failed(name, f" in run {run}"))

    def _failed(self, name: str, where: str) -> IslandLostError:
        lost = f"{self.name} was lost, {self.why_lost}"
        error = IslandLostError(f"op `{name}` failed{where}: {lost}")
        error.op, error.island = name, self.name
        return error


def _text(error: Exception) -> str:
    if isinstance(error, CallTimeoutError):
        return "which gave no sign of life"
    # Which of them ends a call depends on what was under way.
    if isinstance(error, ServerStoppedError | ConnectionLostError):
        return "for its server is gone"
    return f"for {(str(error) or type(error).__name__).splitlines()[0]}"
