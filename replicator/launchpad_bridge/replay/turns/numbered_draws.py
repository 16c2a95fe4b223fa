"""Samples of numbered batches: each is drawn with its own random numbers.

Before batch b is drawn the priorities of batch b - priority_lag are applied, all at
once, whenever they arrived. So the sample is a function of the seed, of b, of the rows
and of these priorities: the same in each run. Pure.
"""

from typing import Any, NamedTuple

import numpy as np

from replicator.errors import ArgumentError
from replicator.launchpad_bridge.replay.turns.ring_rows import RingRows


class NumberedSample(NamedTuple):
    """Rows of a batch.

    Attributes:
      serials: int64 [B].
      keys: int64 [B], number of the batch times B plus the place in it: of one place of
        one batch, ever.
      probabilities: float64 [B], with which each was drawn.
    """

    serials: np.ndarray
    keys: np.ndarray
    probabilities: np.ndarray


class NumberedDraws:
    """Draws batches of a `RingRows` in order; for one thread at a time.

    Attributes:
      ring: The rows.
      batch: Number of the next batch.
      counts: Priorities that were `updated`; `late` ones, of rows that went.
    """

    def __init__(
        self, ring: RingRows, *, batch_size: int, priority_lag: int | None, seed: int
    ) -> None:
        """Begin with batch 0.

        Args:
          ring: The rows, none of them drawn yet.
          batch_size: B.
          priority_lag: Number of batches after which priorities are applied, at least
            1; None: they have no meaning.
          seed: Seed of all draws.
        """
        self.ring, self.batch = ring, 0
        self.counts = {"updated": 0, "late": 0}
        self._size, self._lag, self._seed = batch_size, priority_lag, seed
        # Of batches whose priorities are not applied yet: rows, and what has arrived.
        self._drawn: dict[int, np.ndarray] = {}
        self._values: dict[int, np.ndarray] = {}
        self._arrived: dict[int, np.ndarray] = {}

    @property
    def awaited(self) -> int | None:
        """Batch of which priorities must come before the next draw; None for none."""
        due = None if self._lag is None else self.batch - self._lag
        if due is None or due < 0:
            return None
        is_there = due in self._arrived and self._arrived[due].all()
        return None if is_there else due

    def receive(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Keep priorities until their place; those applied before change nothing.

        Args:
          keys: int64 [n], of samples.
          values: float64 [n]; NaN where a row keeps the one that it has.

        Raises:
          ArgumentError: A key is not of a batch that was drawn.
        """
        batches, places = np.divmod(keys, self._size)
        if ((batches < 0) | (batches >= self.batch)).any():
            raise ArgumentError(
                f"`keys` must be keys that this table gave, got {keys.max()} where "
                f"batch {self.batch} of {self._size} is next. Pass `Taken.keys`."
            )
        for batch in np.unique(batches).tolist():
            if batch in self._drawn:
                here = batches == batch
                blank = np.full(self._size, np.nan)
                self._values.setdefault(batch, blank)[places[here]] = values[here]
                blank = np.zeros(self._size, bool)
                self._arrived.setdefault(batch, blank)[places[here]] = True

    def due(self) -> np.ndarray | None:
        """Return the priorities to apply now, float64 [B]; None before there are any.

        `awaited` must be None.
        """
        batch = None if self._lag is None else self.batch - self._lag
        return None if batch is None or batch < 0 else self._values[batch]

    def draw(self, due: np.ndarray | None) -> NumberedSample:
        """Apply the priorities that are due, and draw the next batch."""
        if due is not None and self._lag is not None:
            batch = self.batch - self._lag
            self._values.pop(batch, None)
            self._arrived.pop(batch, None)
            updated, late = self.ring.update(self._drawn.pop(batch), due)
            self.counts["updated"] += updated
            self.counts["late"] += late
        random = np.random.default_rng([self._seed, self.batch])
        serials, probabilities = self.ring.draw(random.random(self._size))
        keys = self.batch * self._size + np.arange(self._size)
        if self._lag is not None:
            self._drawn[self.batch] = serials
        self.batch += 1
        return NumberedSample(serials, keys, probabilities)

    def to_saved(self) -> dict[str, Any]:
        """Return batches and rows as plain data, without priorities that wait."""
        return {
            "batch": self.batch,
            "drawn": [self._drawn[batch] for batch in sorted(self._drawn)],
            "counts": dict(self.counts),
            **self.ring.to_saved(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `to_saved` returned, before anything is drawn."""
        self.ring.restore(saved)
        self.batch, self.counts = saved["batch"], dict(saved["counts"])
        first = self.batch - len(saved["drawn"])
        self._drawn = dict(enumerate(saved["drawn"], first))
