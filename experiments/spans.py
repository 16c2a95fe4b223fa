"""Seconds in which slices compute, for the picture and the shares of an experiment."""

import concurrent.futures
import time
from typing import Any

import jax


class Spans:
    """When ops of slices began, and ended.

    An op begins when it was called, its arguments are there, and the one before it on
    its slice has ended. A thread for each slice waits for these, so the loop that calls
    ops does not.

    Attributes:
      found: (began, ended) of each op in order, in seconds, by the name of its slice.
    """

    def __init__(self, *names: str) -> None:
        self._zero = time.perf_counter()
        self._threads = {
            name: concurrent.futures.ThreadPoolExecutor(1, f"{name}-spans")
            for name in names
        }
        self.found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}

    def now(self) -> float:
        """Return seconds since it was made."""
        return time.perf_counter() - self._zero

    def watch(self, name: str, results: Any, arguments: Any = ()) -> None:
        """Note an op that was called just now.

        Args:
          name: Of its slice.
          results: Tree of its futures.
          arguments: Tree of futures of other slices that it takes.
        """
        self._threads[name].submit(self._wait, name, self.now(), results, arguments)

    def add(self, name: str, began: float) -> None:
        """Note an op that began at this second, and has ended just now."""
        self.found[name].append((began, self.now()))

    def close(self) -> None:
        """Wait for the ops that are watched."""
        for thread in self._threads.values():
            thread.shutdown()

    def busy(self, name: str, since: float) -> float:
        """Return the share of the seconds from `since` on that a slice computed."""
        until = max(ended for spans in self.found.values() for _, ended in spans)
        spent = (max(0.0, end - max(begin, since)) for begin, end in self.found[name])
        return sum(spent) / (until - since)

    def _wait(self, name: str, called: float, results: Any, arguments: Any) -> None:
        for each in jax.tree.leaves(arguments):
            each.result()
        before = self.found[name][-1][1] if self.found[name] else 0.0
        began = max(called, before, self.now() if jax.tree.leaves(arguments) else 0.0)
        for each in jax.tree.leaves(results):
            each.result()
        self.add(name, began)
