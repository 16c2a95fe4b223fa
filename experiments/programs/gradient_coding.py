"""Descend a gradient without waiting for stragglers, and without losing any of it.

The data is cut into n parts. Worker i holds s + 1 of them, i … i + s (mod n), and
answers with one vector: a fixed mixture, row i of B, of its parts' gradients. B is made
so that from the answers of any n − s workers the sum over all parts follows exactly:

    survivors F    a with a·B[F] = (1, …, 1)    gradient = Σ aᵢ · answer of worker i

So each step ends when n − s have answered, whoever they are. The price: s + 1 times the
arithmetic. R. Tandon, Q. Lei, A. G. Dimakis and N. Karampatziakis, "Gradient Coding:
Avoiding Stragglers in Distributed Learning", ICML 2017; B is their cyclic repetition
scheme (Algorithm 2).
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

import replicator.launchpad_bridge as lp
from experiments.programs import launch_flag
from replicator import rpc

Part: TypeAlias = tuple[np.ndarray, np.ndarray]


def cyclic_code(workers: int, stragglers: int, *, seed: int = 0) -> np.ndarray:
    """Return B: what worker i takes of part j; zero but for j in i … i + s (mod n).

    H has random rows that are orthogonal to (1, …, 1). Each row of B is the vector of
    its cyclic support that is orthogonal to H, so any n − s rows of B span the space of
    all that are, to which (1, …, 1) belongs.

    Args:
      workers: How many, n, and how many parts.
      stragglers: How many may be missing, s < n.
      seed: Of H.

    Returns:
      B [n, n], 1 on the diagonal.
    """
    h = np.random.default_rng(seed).normal(size=(stragglers, workers))
    h[:, -1] = -h[:, :-1].sum(axis=1)
    code = np.eye(workers)
    for row in range(workers):
        others = (row + 1 + np.arange(stragglers)) % workers
        code[row, others] = -np.linalg.solve(h[:, others], h[:, row])
    return code


def decoding(code: np.ndarray, survivors: Sequence[int]) -> np.ndarray:
    """Return a [len(survivors)]: how their answers add up to the full gradient."""
    ones = np.ones(len(code))
    return np.linalg.lstsq(code[list(survivors)].T, ones, rcond=None)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Descent:
    """The task: logistic regression, from data drawn with a seed.

    Attributes:
      examples: Over all parts.
      features: Of each, and so weights.
      steps: Of the descent.
      rate: Of the descent; the gradient is a sum over examples.
      seed: Of the data.
    """

    examples: int = 8_000
    features: int = 64
    steps: int = 40
    rate: float = 1e-3
    seed: int = 0


def make_parts(count: int, descent: Descent) -> list[Part]:
    """Return the data cut into parts: x [examples, features] and labels of 0 and 1."""
    rng = np.random.default_rng(descent.seed)
    x = rng.normal(size=(descent.examples, descent.features))
    noise = rng.logistic(size=descent.examples)
    y = x @ rng.normal(size=descent.features) + noise > 0
    return list(zip(np.array_split(x, count), np.array_split(y, count), strict=True))


def gradient(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the gradient of logistic regression's loss, summed over the examples."""
    return x.T @ (1 / (1 + np.exp(-x @ weights)) - y)


class Worker:
    """Holds s + 1 parts of the data, and is sometimes late."""

    def __init__(
        self,
        number: int,
        parts: Mapping[int, Part],
        row: np.ndarray,
        delay_ms: float,
    ) -> None:
        self._number = number
        self._parts = parts
        self._row = row
        self._delay_s = delay_ms / 1e3

    def coded_gradient(self, weights: np.ndarray, step: int) -> np.ndarray | None:
        """Return Σ B[i, j] · gradient of part j; None if nobody waits any more."""
        if self._straggles(step):
            return None
        mixed = [self._row[j] * gradient(weights, *p) for j, p in self._parts.items()]
        return np.sum(mixed, axis=0)

    def plain_gradient(self, weights: np.ndarray, step: int) -> np.ndarray | None:
        """Return the gradient of its own part, without any code: for comparison."""
        if self._straggles(step):
            return None
        return gradient(weights, *self._parts[self._number])

    def _straggles(self, step: int) -> bool:
        """Sleep for the delay of this step; return whether the call was cancelled.

        The delay is a machine's that is busy otherwise: it comes before the work, has
        an exponential tail, and is the same whichever gradient is asked for.
        """
        rng = np.random.default_rng((self._number, step))
        call = rpc.current_call()  # knows when the server has given this call up
        assert call is not None  # a handler has one
        return call.wait_cancelled(rng.exponential(self._delay_s))


class Server:
    """Descends by both gradients, in turn: as soon as enough answered, and once all."""

    def __init__(
        self,
        workers: Sequence[lp.CourierClient],
        code: np.ndarray,
        stragglers: int,
        descent: Descent,
    ) -> None:
        self._workers = workers
        self._code = code
        self._needed = len(workers) - stragglers
        self._descent = descent

    def run(self) -> dict[str, Any]:
        """Take the same steps in both ways; return where each came to, and how fast."""
        ways = {"coded": self._coded, "plain": self._plain}
        weights = {name: np.zeros(self._descent.features) for name in ways}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for step in range(self._descent.steps):
            for name, full_gradient in ways.items():
                started_s = time.monotonic()
                found = full_gradient(weights[name], step)
                weights[name] = weights[name] - self._descent.rate * found
                seconds[name].append(time.monotonic() - started_s)
        lp.stop()
        return {"weights": weights, "seconds": seconds}

    def _coded(self, weights: np.ndarray, step: int) -> np.ndarray:
        calls: dict[concurrent.futures.Future[np.ndarray], int] = {
            worker.futures.coded_gradient(weights, step): number
            for number, worker in enumerate(self._workers)
        }
        answers: dict[int, np.ndarray] = {}
        for call in concurrent.futures.as_completed(calls):
            answers[calls[call]] = call.result()
            if len(answers) == self._needed:
                break
        for call in calls:
            call.cancel()  # the worker stops; one that is done is not affected
        return decoding(self._code, list(answers)) @ np.stack(list(answers.values()))

    def _plain(self, weights: np.ndarray, step: int) -> np.ndarray:
        calls = [w.futures.plain_gradient(weights, step) for w in self._workers]
        return np.sum([call.result() for call in calls], axis=0)


def make_program(
    workers: int, stragglers: int, delay_ms: float, descent: Descent
) -> lp.Program:
    """Return the graph: a server with an edge to each worker."""
    code = cyclic_code(workers, stragglers)
    parts = make_parts(workers, descent)
    program = lp.Program("gradient_coding")
    handles = []
    with program.group("workers"):
        for number in range(workers):
            own = {j: parts[j] for j in np.flatnonzero(code[number]).tolist()}
            node = lp.CourierNode(Worker, number, own, code[number], delay_ms)
            handles.append(program.add_node(node))
    server = lp.PyClassNode(Server, handles, code, stragglers, descent)
    program.add_node(server, label="server")
    return program


def descend(
    launch_type: str | lp.Launcher = "threads",
    *,
    workers: int = 8,
    stragglers: int = 2,
    delay_ms: float = 20,
    descent: Descent | None = None,
) -> dict[str, Any]:
    """Run the program; return the last weights, and the seconds of each step, by way.

    Args:
      launch_type: Where nodes run.
      workers: How many, n, and how many parts.
      stragglers: How many may be missing, s.
      delay_ms: Mean of what a worker is late by, at each step anew.
      descent: What is learnt from what.
    """
    program = make_program(workers, stragglers, delay_ms, descent or Descent())
    with lp.launch(program, launch_type) as run:
        run.wait()
        return run.results["server"]


def main(launch_type: str) -> None:
    found = descend(launch_type)
    medians_ms = {name: 1e3 * np.median(s) for name, s in found["seconds"].items()}
    apart = np.abs(found["weights"]["coded"] - found["weights"]["plain"]).max()
    print(
        f"a step takes {medians_ms['coded']:.1f} ms from any 6 of 8 workers, "
        f"{medians_ms['plain']:.1f} ms from all 8; their weights differ by {apart:.0e}"
    )


if __name__ == "__main__":
    launch_flag.run(main)
