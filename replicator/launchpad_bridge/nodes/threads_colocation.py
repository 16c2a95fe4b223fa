"""Several nodes in the threads of one worker: `MultiThreadingColocation`."""

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from replicator.base.types import PyTree
from replicator.errors import ProgramError
from replicator.launchpad_bridge.addresses.promises import Address
from replicator.launchpad_bridge.nodes.node import Node
from replicator.launchpad_bridge.nodes.py_node import PyNode
from replicator.launchpad_bridge.running import node_context
from replicator.launchpad_bridge.running.node_context import (
    RunningContext,
    loose_context,
)
from replicator.launchpad_bridge.running.stopping import finish_handlers
from replicator.launchpad_bridge.running.thread_interrupt import raise_in_thread

_TAIL_S = 1.0
_LOOK_S = 0.2


class Colocation(PyNode[Any, Any]):
    """Nodes added as one; they are not added to the program themselves."""

    def __init__(self, nodes: Sequence[Node[Any]]) -> None:
        super().__init__(self.run)
        self._nodes: list[Node[Any]] = []
        self._counts: collections.Counter[str] = collections.Counter()
        for node in nodes:
            self.add_node(node)

    @property
    def nodes(self) -> list[Node[Any]]:
        """Return the inner nodes."""
        return self._nodes

    @property
    def inner_nodes(self) -> list[Node[Any]]:
        """Return the inner nodes."""
        return list(self._nodes)

    @property
    def description(self) -> str:
        """Return the names of its nodes."""
        return f"[{', '.join(node.description for node in self._nodes)}]"

    def add_node(self, node: Node[Any]) -> Any:
        """Add a node; return its handle.

        Raises:
          ProgramError: It is not a `PyNode`, or is several workers itself.
        """
        if not isinstance(node, PyNode):
            raise ProgramError(f"{type(self).__name__} only works with PyNodes.")
        if node.is_expanded:
            raise ProgramError(
                f"`node` must be one worker, got {node!r} in a {type(self).__name__}. "
                "Add it to the program itself."
            )
        if node.has_own_process and not self.is_expanded:
            raise ProgramError(
                f"`node` must be one that runs in a thread, got {node!r} in a "
                f"{type(self).__name__}. Add it to the program itself."
            )
        self._nodes.append(node)
        for address in node.addresses:
            self._take_over(address)
        return node.create_handle()

    def forget_run(self) -> None:
        """Make the inner nodes begin anew in the next start."""
        for node in self._nodes:
            node.forget_run()

    def run(self) -> list[PyTree]:
        """Run the inner nodes; return their results."""
        raise NotImplementedError

    def _take_over(self, address: Address) -> None:
        """Add the address of an inner node, under a name that is unique here."""
        self.addresses.append(address)
        name = address.name or "lp"
        address.name = f"{name}{self._counts[name]}"
        self._counts[name] += 1

    def check_nodes(self) -> None:
        """Raise if there are no nodes.

        Raises:
          ProgramError: There are none.
        """
        if not self._nodes:
            raise ProgramError(f"{type(self).__name__} requires at least one node.")


class MultiThreadingColocation(Colocation):
    """Runs its nodes in threads of one worker.

    >>> nodes = [lp.CourierNode(Learner), lp.PyNode(print, "beside it")]
    >>> handle = program.add_node(lp.MultiThreadingColocation(nodes), label="learner")
    """

    def __init__(
        self, nodes: Sequence[Node[Any]], return_on_first_completed: bool = False
    ) -> None:
        """Add the nodes.

        Args:
          nodes: Nodes to run together.
          return_on_first_completed: Whether to end when the first of them has ended,
            not all. An error of one ends it in any case.
        """
        self._return_on_first_completed = return_on_first_completed
        super().__init__(nodes)

    def run(self) -> list[PyTree]:
        """Run the inner nodes; return their results, None for one that still runs."""
        self.check_nodes()
        outer = node_context.of_thread() or loose_context()
        threads = _Threads(self._nodes, outer)
        cancel = outer.stop_event.when_set(threads.ask_to_stop)
        try:
            return threads.run(first=self._return_on_first_completed)
        except SystemExit:
            # This worker is killed, and cannot reach its threads any more after that.
            threads.end()
            raise
        finally:
            cancel()
            threads.ask_to_stop()


class _Ended(NamedTuple):
    number: int
    result: PyTree = None
    error: BaseException | None = None


class _Threads:
    """The threads of inner nodes."""

    def __init__(self, nodes: Sequence[Node[Any]], outer: RunningContext) -> None:
        self._nodes = nodes
        self._contexts = [outer.inner() for _ in nodes]
        self._turns = None if outer.exchange is None else outer.exchange.turns
        # Each inner thread puts its end here once; only the worker's thread takes.
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        # Daemons: a worker that is killed cannot join them.
        self._threads = [
            threading.Thread(
                target=self._run, args=(i,), name=f"{outer.worker}.{i}", daemon=True
            )
            for i in range(len(nodes))
        ]

    def run(self, *, first: bool) -> list[PyTree]:
        """Run them until all, or the first, have ended; raise the error of one."""
        results: list[PyTree] = [None] * len(self._nodes)
        # Where nodes take turns, the inner ones do, and this thread does not.
        with self._in_turn("outside", [thread.name for thread in self._threads]):
            for thread in self._threads:
                thread.start()
            for _ in self._nodes:
                ended = self._next()
                if ended.error is not None:
                    self.ask_to_stop()
                    self._join(_TAIL_S)
                    inner = self._nodes[ended.number]
                    ended.error.add_note(f"In the inner node {inner!r}.")
                    raise ended.error
                results[ended.number] = ended.result
                if first:
                    break
        return results

    def ask_to_stop(self) -> None:
        """Set the stop events of all."""
        for context in self._contexts:
            context.stop_event.set()

    def end(self) -> None:
        """Raise `SystemExit` in all threads, which ends those that run Python."""
        for thread in self._threads:
            raise_in_thread(thread, SystemExit)

    def _run(self, index: int) -> None:
        context = self._contexts[index]
        try:
            with context.entered(), self._in_turn("taken", self._threads[index].name):
                result = self._nodes[index].function()  # type: ignore[attr-defined]
                finish_handlers(context)
            self._ended.put(_Ended(index, result))
        except BaseException as error:
            is_well = isinstance(error, SystemExit) and error.code in (None, 0)
            self._ended.put(_Ended(index, error=None if is_well else error))

    def _in_turn(self, how: str, names: Any) -> contextlib.AbstractContextManager[None]:
        if self._turns is None:
            return contextlib.nullcontext()
        return getattr(self._turns, how)(names)

    def _next(self) -> _Ended:
        while True:
            # With a bound: what kills this worker is noticed between two looks.
            try:
                return self._ended.get(timeout=_LOOK_S)
            except queue.Empty:
                continue

    def _join(self, patience_s: float) -> None:
        until_s = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
