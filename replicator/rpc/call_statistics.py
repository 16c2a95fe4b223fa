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
_MOST_CALLERS = 256
"""Who says another name at each connection fills no memory: the rest have no name."""


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
class CallerStatistics:
    """What clients of one name have called, since the server started.

    Attributes:
      calls: Calls that ran and ended.
      bytes_in: Bytes of their messages; 0 where nothing was encoded.
      bytes_out: Bytes of the replies.
    """

    calls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def __add__(self, other: "CallerStatistics") -> "CallerStatistics":
        return CallerStatistics(
            calls=self.calls + other.calls,
            bytes_in=self.bytes_in + other.bytes_in,
            bytes_out=self.bytes_out + other.bytes_out,
        )


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
      callers: What was called by whom, for clients that say a name.
    """

    methods: dict[str, MethodStatistics]
    connections: int
    queued: int
    running: int
    pool_size: int
    refused: int
    callers: dict[str, CallerStatistics] = dataclasses.field(default_factory=dict)


@final
class CallRecords:
    """The records of one method; `add` from any thread."""

    __slots__ = (
        "_bytes_in",
        "_bytes_out",
        "_callers",
        "_calls",
        "_errors",
        "_lock",
        "_new",
        "_s",
    )

    def __init__(self) -> None:
        self._new: collections.deque[tuple[float, int, int, bool, str]] = (
            collections.deque()
        )
        self._callers: dict[str, list[int]] = {}
        self._s: collections.deque[float] = collections.deque(maxlen=_KEPT_TIMES)
        # Guards the sums, and who takes from `_new`; `add` appends without it.
        self._lock = threading.Lock()
        self._calls = self._errors = self._bytes_in = self._bytes_out = 0

    def add(
        self,
        seconds: float,
        bytes_in: int,
        bytes_out: int,
        is_error: bool,
        caller: str = "",
    ) -> None:
        """Remember one call that ended."""
        self._new.append((seconds, bytes_in, bytes_out, is_error, caller))
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

    def callers(self) -> dict[str, CallerStatistics]:
        """Return what was called by whom, for clients that said a name."""
        self._fold()
        with self._lock:
            return {
                name: CallerStatistics(
                    calls=calls, bytes_in=bytes_in, bytes_out=bytes_out
                )
                for name, (calls, bytes_in, bytes_out) in self._callers.items()
            }

    def _fold(self) -> None:
        with self._lock:
            while self._new:
                seconds, bytes_in, bytes_out, is_error, caller = self._new.popleft()
                if caller:
                    counts = self._callers.get(caller) or self._counts_of(caller)
                    counts[0] += 1
                    counts[1] += bytes_in
                    counts[2] += bytes_out
                self._s.append(seconds)
                self._calls += 1
                self._errors += is_error
                self._bytes_in += bytes_in
                self._bytes_out += bytes_out

    def _counts_of(self, new: str) -> list[int]:
        """Return the counts of a new name; of one too many, counts that are lost."""
        if len(self._callers) < _MOST_CALLERS:
            return self._callers.setdefault(new, [0, 0, 0])
        return [0, 0, 0]


def _percentile(ordered: list[float], fraction: float) -> float:
    """Return the smallest value that `fraction` of all do not exceed."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
