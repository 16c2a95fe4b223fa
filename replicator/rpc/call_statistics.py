"""Statistics of a server's methods: calls, errors, times, bytes.

Times are those of the last 1,024 calls.
"""

import collections
import dataclasses
import threading

_KEPT_TIMES = 1_024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MethodStatistics:
    """One method since its server started.

    Attributes:
      calls: Calls that ran and ended.
      errors: Calls that raised, or returned a value that cannot be sent.
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
class CallerStatistics:
    """Calls of the clients of one name, since the server started.

    Attributes:
      calls: Calls that ran and ended.
      bytes_in: Bytes of their messages; 0 where nothing was encoded.
      bytes_out: Bytes of the replies.
    """

    calls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerStatistics:
    """A server and all of its methods.

    Attributes:
      methods: By name.
      connections: Clients that are connected now.
      queued: Calls that wait now for a free place in the pool.
      running: Calls that run now.
      pool_size: Number of calls that may run at once.
      refused: Calls answered without running them: late, cancelled, unknown, stopping.
      callers: Calls by client name, for clients that have one.
    """

    methods: dict[str, MethodStatistics]
    connections: int
    queued: int
    running: int
    pool_size: int
    refused: int
    callers: dict[str, CallerStatistics] = dataclasses.field(default_factory=dict)


class CallRecords:
    """The sums of one method, or of one caller; `add` from any thread."""

    def __init__(self, *, kept_times: int = _KEPT_TIMES) -> None:
        # Guards all of these; no other lock is taken under it.
        self._lock = threading.Lock()
        self._s: collections.deque[float] = collections.deque(maxlen=kept_times)
        self._calls = self._errors = self._bytes_in = self._bytes_out = 0

    def add(
        self, seconds: float, bytes_in: int, bytes_out: int, is_error: bool
    ) -> None:
        """Add one call that ended.

        >>> records = CallRecords()
        >>> records.add(0.25, 100, 8, False)
        >>> records.summary().p50_s
        0.25
        """
        with self._lock:
            self._s.append(seconds)
            self._calls += 1
            self._errors += is_error
            self._bytes_in += bytes_in
            self._bytes_out += bytes_out

    def summary(self, *, queued: int = 0, running: int = 0) -> MethodStatistics:
        """Return the sums."""
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

    def of_caller(self) -> CallerStatistics:
        """Return the sums that statistics show for a caller."""
        with self._lock:
            return CallerStatistics(
                calls=self._calls, bytes_in=self._bytes_in, bytes_out=self._bytes_out
            )


def _percentile(ordered: list[float], fraction: float) -> float:
    """Return the smallest value that `fraction` of all do not exceed."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
