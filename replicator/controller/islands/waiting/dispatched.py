"""What an island dispatched, and the threads that wait until it is computed."""

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax

from replicator.controller.islands.waiting.outcome import Outcome
from replicator.engine.run_ahead import MOST_ON_CPU

Item = TypeVar("Item")
_MOST_TOGETHER = MOST_ON_CPU // 2


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class DispatchedOp:
    """An op that was dispatched, or could not be.

    Attributes:
      run: Its run.
      outputs: Numbers of its results.
      inputs: End when what it takes is computed.
      name: Its name, for errors.
      line: The user's line that called it.
      token: What is there when it is computed: one array, or several.
      is_passing: Whether the next one takes what it makes, and nothing else waits.
      error: Why it could not be dispatched.
      done: Ends when it is computed, with the error of the op that failed.
    """

    run: int
    outputs: Sequence[int]
    inputs: Sequence[Outcome]
    name: str
    line: str
    token: Any = ()
    is_passing: bool = False
    error: BaseException | None = None
    done: Outcome = dataclasses.field(default_factory=Outcome)

    def wait(self) -> None:
        """Wait until it is computed, and raise why it is not."""
        if isinstance(self.token, (list, tuple)):
            jax.block_until_ready(self.token)
        else:
            self.token.block_until_ready()


class SliceThread(Generic[Item]):
    """A thread of a slice: it does what it is given, in this order.

    Args:
      name: Its name.
      do: Does one: waits for an op and reports it, or calls a function.
    """

    def __init__(self, name: str, do: Callable[[Item], None]) -> None:
        self._do = do
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Take one."""
        self._queue.put(item)

    def close(self) -> None:
        """End after those so far."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            self._do(item)
            del item  # it would live until the next


class WaitingThread(SliceThread[DispatchedOp]):
    """A thread that waits for the ops of a slice; in a chain, for several at once.

    To be woken takes as long as a small op. If one of them fails, so do those after it.
    """

    def _work(self) -> None:
        while ops := self._next():
            if len(ops) > 1:
                with contextlib.suppress(Exception):
                    ops[-1].wait()
            while ops:  # none lives until the next
                self._do(ops.pop(0))

    def _next(self) -> list[DispatchedOp]:
        """Return an op, and of a chain what is there behind it; none at the end."""
        ops: list[DispatchedOp] = []
        while (op := self._queue.get()) is not None:
            ops.append(op)
            is_last = not op.is_passing or len(ops) == _MOST_TOGETHER
            if is_last or self._queue.empty():
                return ops
        if ops:
            self._queue.put(None)  # for the next turn
        return ops
