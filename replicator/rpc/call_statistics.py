"""What a server knows about each of its methods: calls, errors, times, bytes.

A call leaves one record in a deque, which is atomic and cheap; the sums are made when
somebody asks, or when 256 records lie there. Times are those of the last 1,024 calls.
"""

import collections
import dataclasses
import threading
from typing import final

_FOLD_AT = 256
_KEPT_TIMES = 1_024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MethodStatistics:
    """One method since its server started.

    Attributes:
      calls: Calls that ran and ended.
      errors: Those of them that raised, or returned what cannot be sent.
      p50_s: Median time in the method, over the last 1,024 calls; 0 before the first.
      p99_s: Likewise, what 99 of 100 calls did not exceed.
      bytes_in: Bytes of their messages; 0 where nothing was encoded.
      bytes_out: Bytes of the replies.
      queued: Calls that wait now for a free place in the pool.
      running: Calls that run now.
    """

    calls: int
    errors: int
    p50_s: float
    p99_s: float
    bytes_in: int
    bytes_out: int
    queued: int = 0
    running: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerStatistics:
    """A server and all of its methods.

    Attributes:
      methods: By name.
      connections: Clients that are connected now.
      queued: Calls that wait now for a free place in the pool.
      running: Calls that run now.
      pool_size: How many may run at once.
      refused: Calls answered without running them: late, cancelled, unknown, stopping.
    """

    methods: dict[str, MethodStatistics]
    connections: int
    queued: int
    running: int
    pool_size: int
    refused: int


@final
class CallRecords:
    """The records of one method; `add` from any thread."""

    __slots__ = ("_bytes_in", "_bytes_out", "_calls", "_errors", "_lock", "_new", "_s")

    def __init__(self) -> None:
        self._new: collections.deque[tuple[float, int, int, bool]] = collections.deque()
        self._s: collections.deque[float] = collections.deque(maxlen=_KEPT_TIMES)
        self._lock = threading.Lock()
        self._calls = self._errors = self._bytes_in = self._bytes_out = 0

    def add(
        self, seconds: float, bytes_in: int, bytes_out: int, is_error: bool
    ) -> None:
        """Remember one call that ended."""
        self._new.append((seconds, bytes_in, bytes_out, is_error))
        if len(self._new) >= _FOLD_AT:
            self._fold()

    def summary(self, *, queued: int = 0, running: int = 0) -> MethodStatistics:
        """Return the sums."""
        self._fold()
        with self._lock:
            times = sorted(self._s)
            return MethodStatistics(
                calls=self._calls,
                errors=self._errors,
                p50_s=_percentile(times, 0.50),
                p99_s=_percentile(times, 0.99),
                bytes_in=self._bytes_in,
                bytes_out=self._bytes_out,
                queued=queued,
                running=running,
            )

    def _fold(self) -> None:
        with self._lock:
            while self._new:
                seconds, bytes_in, bytes_out, is_error = self._new.popleft()
                self._s.append(seconds)
                self._calls += 1
                self._errors += is_error
                self._bytes_in += bytes_in
                self._bytes_out += bytes_out


def _percentile(ordered: list[float], fraction: float) -> float:
    """Return the smallest value that `fraction` of all do not exceed."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
