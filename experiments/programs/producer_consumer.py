"""Find primes: a consumer hands out ranges, producers search them, the fastest more.

    consumer ── primes(start, stop) ──▶ producers/0 … producers/3

Each producer has one range at a time. Who is done first gets the next, so nobody waits
for the slowest, whatever the ranges cost.
"""

import concurrent.futures
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import replicator.launchpad_bridge as lp
from experiments.programs import launch_flag


class Producer:
    """Finds the primes of a range; its public methods are what others may call."""

    def primes(self, start: int, stop: int) -> np.ndarray:
        """Return the primes p with start ≤ p < stop, by Eratosthenes' sieve."""
        is_prime = np.ones(stop - start, bool)
        is_prime[: max(0, 2 - start)] = False  # 0 and 1
        for divisor in range(2, math.isqrt(stop) + 1):
            first = max(divisor * divisor, -(-start // divisor) * divisor)
            is_prime[first - start :: divisor] = False
        return start + np.flatnonzero(is_prime)


class Consumer:
    """Keeps all producers busy until there is nothing left; then stops the program."""

    def __init__(
        self, producers: Sequence[lp.CourierClient], stop: int, chunk: int
    ) -> None:
        self._producers = producers  # were handles in the program, are clients here
        self._ranges = [(n, min(n + chunk, stop)) for n in range(0, stop, chunk)]

    def run(self) -> dict[str, Any]:
        """Collect all primes; what a node's `run` returns is a result of the run."""
        ranges = iter(self._ranges)
        busy: dict[concurrent.futures.Future[np.ndarray], int] = {}
        found: list[np.ndarray] = []
        done_by = [0] * len(self._producers)

        def hand_out(number: int) -> None:
            for start, stop in itertools.islice(ranges, 1):  # none, if all are given
                call = self._producers[number].futures.primes(start, stop)
                busy[call] = number

        for number in range(len(self._producers)):
            hand_out(number)
        while busy:
            ready, _ = concurrent.futures.wait(busy, return_when="FIRST_COMPLETED")
            for call in ready:
                number = busy.pop(call)
                hand_out(number)
                found.append(call.result())  # raises here what the producer raised
                done_by[number] += 1
        lp.stop()
        return {"primes": np.sort(np.concatenate(found)), "done_by": done_by}


def make_program(producers: int, stop: int, chunk: int) -> lp.Program:
    """Return the graph: one consumer with an edge to each producer."""
    program = lp.Program("producer_consumer")
    with program.group("producers"):
        handles = [program.add_node(lp.CourierNode(Producer)) for _ in range(producers)]
    program.add_node(lp.PyClassNode(Consumer, handles, stop, chunk), label="consumer")
    return program


def find_primes(
    launch_type: str | lp.Launcher = "threads",
    *,
    producers: int = 4,
    stop: int = 1_000_000,
    chunk: int = 20_000,
) -> dict[str, Any]:
    """Run the program; return all primes below `stop`, and who searched how much."""
    with lp.launch(make_program(producers, stop, chunk), launch_type) as run:
        run.wait()
        return run.results["consumer"]


def main(launch_type: str) -> None:
    found = find_primes(launch_type)
    shares = ", ".join(map(str, found["done_by"]))
    print(f"{len(found['primes'])} primes below 1000000; ranges per producer: {shares}")


if __name__ == "__main__":
    launch_flag.run(main)
