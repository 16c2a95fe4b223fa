"""Calls to time: works that take turns, and what came of each."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.rpc.peers import Call
from benchmarks.timing import estimate, ratio, time_rounds


class Work(NamedTuple):
    """Something to time: `run(calls)`."""

    run: Callable[[int], None]
    calls: int


class Timed(NamedTuple):
    """The seconds of one call, for each round."""

    seconds: Mapping[str, Sequence[float]]

    def us(self, name: str) -> float:
        """Return the median, in microseconds."""
        return 1e6 * estimate(self.seconds[name]).median

    def ratio(self, name: str, other: str) -> float:
        """Return how many times as long a call of `name` takes."""
        return ratio(self.seconds[name], self.seconds[other]).median


def repeat(call: Call) -> Callable[[int], None]:
    """Return what makes so many calls, one after the other."""

    def run(calls: int) -> None:
        for _ in range(calls):
            call()

    return run


def time_calls(works: Mapping[str, Work], *, rounds: int) -> Timed:
    """Time works in turn, after warming up."""
    blocks = {name: _block(work) for name, work in works.items()}
    times_s = time_rounds(blocks, rounds=rounds)
    return Timed(
        {
            name: [block_s / work.calls for block_s in times_s[name]]
            for name, work in works.items()
        }
    )


def _block(work: Work) -> Callable[[], None]:
    return lambda: work.run(work.calls)
