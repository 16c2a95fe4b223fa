"""Yield an input's batches except some, and record which step got which batch.

A batch is identified by its index in the whole input, so the same ones are left out in
every run over it, wherever the run began. A call of several steps is left out whole.
"""

import collections
from collections.abc import Iterable, Iterator

from replicator.inputs.placement import Placed
from replicator.inputs.prefetch import Prefetcher

_REMEMBERED = 1024  # calls; a bad number is found long before so many more


class SkippedBatches:
    """An iterator of batches without those left out.

    Args:
      batches: The input; closed with this.
      left_out: Calls to leave out, by the index of their first batch.

    Attributes:
      in_order: Whether each step so far got the batch after that of the step before:
        then reading the input again makes the same steps again.
    """

    def __init__(
        self, batches: Prefetcher[Placed], *, left_out: Iterable[int] = ()
    ) -> None:
        self.in_order = True
        self._batches = batches
        self._left_out = frozenset(left_out)
        self._newest: Placed | None = None  # yielded, and not used by a step yet
        # (the first step of a call, the last, the index of its first batch)
        self._calls: collections.deque[tuple[int, int, int]] = collections.deque(
            maxlen=_REMEMBERED
        )

    @property
    def stall_s(self) -> float:
        """Seconds that the consumer has waited for the input so far."""
        return self._batches.stall_s

    def __iter__(self) -> Iterator[Placed]:
        return self

    def __next__(self) -> Placed:
        """Return the next batch that is not left out."""
        batch = next(self._batches)
        while batch.index in self._left_out:
            batch = next(self._batches)
        if self._newest is not None:
            self.in_order = False
        self._newest = batch
        return batch

    def given(self, batch: Placed | None, *, step: int) -> None:
        """Record the batch of a call of the step.

        Args:
          batch: Batch of this iterator; None for one from elsewhere.
          step: Updates made before.
        """
        if batch is None or batch is not self._newest:
            self.in_order = False
        if batch is not None:
            self._calls.append((step + 1, step + batch.steps, batch.index))
        self._newest = None

    def close(self) -> None:
        """Close the input."""
        self._batches.close()

    def call_of(self, step: int) -> int | None:
        """Return the index of the first batch of the call that made `step`.

        None if that is not known any more, or the batch came from elsewhere.
        """
        for first, last, index in self._calls:
            if first <= step <= last:
                return index
        return None
