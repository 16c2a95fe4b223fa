"""What an island dispatched, and the threads that wait until it is computed."""

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class DispatchedOp:
    """An op that was dispatched, or could not be.

    Attributes:
      run: Its run.
      outputs: Numbers of its results.
      inputs: End when what it takes is computed.
      name: Its name, for errors.
      line: The user's line that called it.
      token: Arrays of JAX that are there when it is computed.
      error: Why it could not be dispatched.
      done: Ends when it is computed, with the error of the op that failed.
    """

    run: int
    outputs: Sequence[int]
    inputs: Sequence[Future[None]]
    name: str
    line: str
    token: Any = ()
    error: BaseException | None = None
    done: Future[None] = dataclasses.field(default_factory=Future)


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
