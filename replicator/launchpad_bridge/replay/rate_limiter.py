"""How often rows are drawn for each that is inserted: who is ahead waits.

Reverb's `SampleToInsertRatio` and `MinSize` (Cassirer et al., 2021, section 3.3), for
whole batches. After i rows in and s rows out the table stands at

    d = samples_per_insert * i - s,

and d stays within `error` of samples_per_insert * min_size: an insert that would lead
above waits for samples, a sample that would lead below waits for inserts.
"""

import dataclasses
import math

from replicator.errors import (
    ArgumentError,
    check_count,
    check_number,
    check_positive,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RateLimiter:
    """Limits of inserts and samples of a `ReplayTable`; pure data.

    Attributes:
      min_size: Rows that must be there before any is drawn. Up to there inserts never
        wait.
      samples_per_insert: Rows drawn for each that is inserted; None for any number:
        then only `min_size` holds.
      error: Distance from the ratio that is allowed, in rows drawn; with
        `samples_per_insert`, and at least as large, and 1.

    Raises:
      ArgumentError: An attribute breaks its rule.

    >>> limiter = RateLimiter(min_size=10, samples_per_insert=4, error=8)
    >>> limiter.may_insert(12, at=40, held=10), limiter.may_insert(2, at=40, held=10)
    (False, True)
    >>> limiter.may_take(9, at=40, held=10), limiter.may_take(8, at=40, held=10)
    (False, True)
    """

    min_size: int = 1
    samples_per_insert: float | None = None
    error: float | None = None

    def __post_init__(self) -> None:
        check_count("min_size", self.min_size)
        object.__setattr__(self, "min_size", int(self.min_size))
        ratio, error = self.samples_per_insert, self.error
        if ratio is None:
            if error is not None:
                raise ArgumentError(
                    "`error` must be None without `samples_per_insert`, got "
                    f"{error}. Leave it out, or pass `samples_per_insert`."
                )
            return
        check_positive("samples_per_insert", ratio, "Use 1, or None for any number.")
        if error is None:
            raise ArgumentError(
                f"`error` must be a number with `samples_per_insert={ratio}`, got "
                f"None. Use {10 * max(1, ratio)}."
            )
        check_number("error", error)
        # NaN and infinity are refused by the same comparison.
        if not max(1.0, ratio) <= error < math.inf or ratio == math.inf:
            raise ArgumentError(
                "`error` must be finite, and at least 1 and `samples_per_insert`, got "
                f"{error} for {ratio}. Use {10 * max(1, ratio)}."
            )
        # A float32 of NumPy would miss rows beyond 2^24.
        object.__setattr__(self, "samples_per_insert", float(ratio))
        object.__setattr__(self, "error", float(error))

    @property
    def middle(self) -> float:
        """D that the table is kept around."""
        return (self.samples_per_insert or 0.0) * self.min_size

    def may_insert(self, count: int, *, at: float, held: int) -> bool:
        """Return whether `count` rows may come into a table at d = `at`."""
        if self.samples_per_insert is None or held < self.min_size:
            return True
        assert self.error is not None
        return at + self.samples_per_insert * count <= self.middle + self.error

    def may_take(self, count: int, *, at: float, held: int) -> bool:
        """Return whether `count` rows may be drawn from a table at d = `at`."""
        if held < self.min_size:
            return False
        return self.error is None or at - count >= self.middle - self.error

    def check_sizes(self, *, batch: int, insert: int) -> None:
        """Raise if batches and inserts of these sizes could wait for each other.

        Where a batch waits, d is below `middle - error + batch`. The insert that it
        waits for must fit above that; as must one that leads past `min_size`.

        Raises:
          ArgumentError: `error` is too small for them.
        """
        ratio, error = self.samples_per_insert, self.error
        if ratio is None or error is None:
            return
        least = max((batch + ratio * insert) / 2, ratio * (insert - 1))
        if error < least:
            raise ArgumentError(
                f"`error` must be at least {least:g}, for samples of {batch} "
                f"(`batch_size` x `samples_per_call`) and inserts of {insert} at "
                f"{ratio:g} rows drawn per insert, got {error:g}: none could ever "
                f"pass. Use {2 * least:g}, or take or insert fewer at once."
            )


class LimitedCounts:
    """What a limiter counts, of one table; for one thread at a time.

    Attributes:
      limiter: The limiter.
      inserted: Rows that came in.
      taken: Rows drawn.
      writing: Rows on their way in, which count for inserts, and not yet for samples.
      start: d with which the counts began.
      batch: Rows in the largest batch so far.
    """

    def __init__(self, limiter: RateLimiter) -> None:
        self.limiter = limiter
        self.inserted = self.taken = self.writing = 0
        self.start = 0.0
        self.batch = self._insert = 1  # the largest so far, as far as they are known

    def __str__(self) -> str:
        limiter = self.limiter
        return f"{self.inserted} rows inserted, {self.taken} drawn, {limiter}"

    def begin_with(self, *, inserted: int, taken: int, start: float, held: int) -> None:
        """Go on with the counts of a checkpoint, of a table of `held` rows.

        Under another limiter d may be out of bounds, on either side; then it begins
        anew, such that neither side waits for ever.
        """
        self.inserted, self.taken, self.start = inserted, taken, start
        limiter, at = self.limiter, self._at(inserted)
        ratio, error = limiter.samples_per_insert, limiter.error
        if ratio is None or error is None:
            return
        if held < limiter.min_size or abs(at - limiter.middle) > error:
            self.start += ratio * min(held, limiter.min_size) - at

    def may_insert(self, count: int, *, held: int) -> bool:
        """Return whether `count` rows may come into a table of `held` rows."""
        return self.limiter.may_insert(
            count,
            at=self._at(self.inserted + self.writing),
            held=held + self.writing,
        )

    def may_take(self, count: int, *, held: int) -> bool:
        """Return whether `count` of `held` rows may be drawn."""
        return self.limiter.may_take(count, at=self._at(self.inserted), held=held)

    def check_sizes(self, *, batch: int = 1, insert: int = 1) -> None:
        """Raise where the largest batch and insert could wait for each other.

        Raises:
          ArgumentError: `error` of the limiter is too small for them.
        """
        batch, insert = max(batch, self.batch), max(insert, self._insert)
        self.limiter.check_sizes(batch=batch, insert=insert)
        self.batch, self._insert = batch, insert

    def _at(self, inserted: int) -> float:
        ratio = self.limiter.samples_per_insert or 0.0
        return self.start + ratio * inserted - self.taken
