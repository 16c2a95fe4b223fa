"""Decide which waiting calls run together, and when. No thread, no clock, no lock.

A call joins the oldest batch that it fits and that has room, or opens one. A batch may
run when it is full, or when `timeout_s` have passed since its first call; of those that
may, the oldest runs first, at most `max_parallelism` at once. While none may start, a
batch whose time is over goes on filling.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchRules:
    """Rules for the calls that run together.

    Attributes:
      batch_size: Number of calls in a full batch.
      max_parallelism: Number of batches that run at once.
      timeout_s: Seconds that the first call of a batch waits for others.
      pad_batch: Whether the function always gets a full batch.
      isolate_errors: Whether it is called for each call alone when it raises.
    """

    batch_size: int
    max_parallelism: int
    timeout_s: float
    pad_batch: bool = False
    isolate_errors: bool = True


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Calls that fit each other.

    Attributes:
      fit: Key that is equal for all of them.
      due_s: Time until which they wait; the first of them watches the clock for all.
      calls: Calls, oldest first, as the driver represents them.
    """

    fit: Hashable
    due_s: float
    calls: list[Any]


class BatchQueue:
    """Batches that wait or run; the driver holds a lock around each call.

    Attributes:
      waiting: Batches that wait, oldest first.
      running: Number of batches that run.
    """

    def __init__(self, rules: BatchRules) -> None:
        self.waiting: list[Batch] = []
        self.running = 0
        self._rules = rules

    def join(self, call: Any, fit: Hashable, now_s: float) -> Batch | None:
        """Let a call wait; return the batch if it is the first, and so must watch.

        >>> rules = BatchRules(batch_size=2, max_parallelism=1, timeout_s=0.2)
        >>> queue = BatchQueue(rules)
        >>> queue.join("a", "images", 0.0)
        Batch(fit='images', due_s=0.2, calls=['a'])
        >>> queue.join("b", "images", 0.1)  # joins the first
        """
        for batch in self.waiting:
            if batch.fit == fit and len(batch.calls) < self._rules.batch_size:
                batch.calls.append(call)
                return None
        opened = Batch(fit, now_s + self._rules.timeout_s, [call])
        self.waiting.append(opened)
        return opened

    def leave(self, call: Any) -> Batch | None:
        """Take a call out that waits; return its batch if another must watch now."""
        for batch in self.waiting:
            if call in batch.calls:
                was_first = batch.calls[0] == call
                batch.calls.remove(call)
                if not batch.calls:
                    self.waiting.remove(batch)
                return batch if was_first and batch.calls else None
        return None

    def start(self, now_s: float) -> list[Batch]:
        """Return the batches to start now, oldest first, as far as there is room.

        >>> rules = BatchRules(batch_size=2, max_parallelism=1, timeout_s=0.2)
        >>> queue = BatchQueue(rules)
        >>> _ = queue.join("a", "images", 0.0)
        >>> queue.start(0.1), [batch.calls for batch in queue.start(0.2)]
        ([], [['a']])
        """
        started = []
        for batch in self.waiting.copy():
            may_run = len(batch.calls) >= self._rules.batch_size or batch.due_s <= now_s
            if may_run and self.running < self._rules.max_parallelism:
                self.waiting.remove(batch)
                self.running += 1
                started.append(batch)
        return started
