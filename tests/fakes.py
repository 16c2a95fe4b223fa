"""What several tests share: a clock that a test moves, a writer that remembers."""

import types
from collections.abc import Mapping

from replicator.errors import DistributedError


class FakeClock:
    def __init__(self, now_s: float = 0.0):
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "a monotonic clock never goes back"
        self._now_s += seconds


class RecordingWriter:
    """Remembers rows and calls; the write of step `fail_at` raises."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.calls: list[str] = []
        self.fail_at: int | None = None

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.calls.append("write")
        if step == self.fail_at:
            raise OSError(f"no room for step {step}")
        self.rows.append(
            (step, {name: float(value) for name, value in scalars.items()})
        )

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


class Board:
    """The notices of several processes, which here are threads."""

    def __init__(self, count, *, fails_once=()):
        self.count = count
        self.said = {}
        self.fails_once = fails_once  # names: each process cannot see these at first

    def of(self, process):
        failing = set(self.fails_once)

        def peek(name):
            if name in failing:
                failing.discard(name)
                raise DistributedError("no answer")
            return [self.said.get((name, other)) for other in range(self.count)]

        return types.SimpleNamespace(
            process=process,
            count=self.count,
            publish=lambda name, value: self.said.update({(name, process): value}),
            peek=peek,
        )
