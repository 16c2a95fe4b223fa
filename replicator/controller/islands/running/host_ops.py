"""Functions of the host that an island calls, in a thread of their slice."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from replicator.controller.islands.waiting.dispatched import SliceThread
from replicator.controller.islands.waiting.outcome import Outcome


class HostArray:
    """An array that a function of the host returns, once it has.

    Args:
      found: Ends with it, or with what the function raised.
    """

    def __init__(self, found: "Future[Any]") -> None:
        self._found = found

    def block_until_ready(self) -> None:
        """Wait for the function, and raise what it raised: as arrays of JAX do."""
        self._found.result()

    def array(self) -> Any:
        """Return the array, once it is there."""
        return self._found.result()


def calling_thread(island: str) -> "SliceThread[Callable[[], None]]":
    """Return a thread that makes calls, one after the other."""

    def do(call: Callable[[], None]) -> None:
        call()

    return SliceThread(f"{island}-host", do)


def call_on_host(
    thread: "SliceThread[Callable[[], None]]",
    run: Callable[..., Sequence[np.ndarray]],
    arrays: Sequence[Any],
    inputs: Sequence[Outcome],
    place: Callable[[Sequence[np.ndarray]], Sequence[Any]],
    count: int,
) -> list[Any]:
    """Have a function called; return what to wait for, and its results.

    Args:
      thread: Calls the functions of its slice, one after the other.
      run: The function.
      arrays: What it takes.
      inputs: End when that is computed.
      place: Places what it returns on the slice.
      count: Number of its results.
    """
    # A later op may be given their memory before they are read.
    kept = [each.copy() for each in arrays]
    found: list[Future[Any]] = [Future() for _ in range(1 + count)]

    def call() -> None:
        try:
            for each in inputs:
                if (error := each.exception()) is not None:
                    raise error
            results = [None, *place(run(*map(np.asarray, kept)))]
        except BaseException as error:  # whatever a user's function raises
            # JAX passes over an `AttributeError` of what it waits for, and by a
            # `SystemExit` the thread would end that waits.
            failure = RuntimeError(str(error) or type(error).__name__)
            failure.__cause__ = error
            for each in found:
                each.set_exception(failure)
        else:
            for each, result in zip(found, results, strict=True):
                each.set_result(result)

    thread.put(call)
    return list(map(HostArray, found))
