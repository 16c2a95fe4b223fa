"""Learn by workers that do not wait for each other, from parameters of bounded age.

    workers ── pull() ──▶ cacher ── pull(), once in 2 ms ──▶ server
       └────── push(gradient, version) ─────────────────────────▲

The cacher answers most pulls, so the server has its hands free for gradients. What it
answers may be some updates old, and a gradient is older still when it arrives. The
server counts how many updates it has made since: more than `max_staleness`, and the
gradient is refused, and the worker fetches newer parameters from the server itself. A
gradient of age k counts 1 / (1 + k), so that many old ones do not overshoot.

Parameter servers: M. Li et al., "Scaling Distributed Machine Learning with the
Parameter Server", OSDI 2014. Bounded age: Q. Ho et al., "More Effective Distributed ML
via a Stale Synchronous Parallel Parameter Server", NIPS 2013. Weights that fall with
it: W. Zhang, S. Gupta, X. Lian and J. Liu, "Staleness-aware Async-SGD", IJCAI 2016.
"""

import collections
import threading
from typing import Any

import numpy as np

import replicator.launchpad_bridge as lp
from experiments.programs import launch_flag

BATCH = 32


def true_weights(features: int) -> np.ndarray:
    """Return what is to be learnt: examples are x with label x · weights."""
    return np.random.default_rng(0).normal(size=features)


class ParameterServer:
    """Holds the parameters; its methods run in several threads at once."""

    def __init__(self, features: int, rate: float, max_staleness: int) -> None:
        self._weights = np.zeros(features)
        self._version = 0
        self._rate = rate
        self._max_staleness = max_staleness
        self._lock = threading.Lock()
        self._staleness: collections.Counter[int] = collections.Counter()
        self._refused = 0
        self._pulls = 0

    def pull(self) -> dict[str, Any]:
        """Return the parameters, and after how many updates they are those."""
        with self._lock:
            self._pulls += 1
            return {"weights": self._weights, "version": self._version}

    def push(self, gradient: np.ndarray, version: int) -> bool:
        """Take a gradient at the parameters of `version`; return False if too old."""
        with self._lock:
            staleness = self._version - version
            if staleness > self._max_staleness:
                self._refused += 1
                return False
            # A new array: the old one may just be on its way to somebody.
            self._weights = self._weights - self._rate / (1 + staleness) * gradient
            self._version += 1
            self._staleness[staleness] += 1
            return True

    def report(self) -> dict[str, Any]:
        """Return where the parameters are, and what happened on the way."""
        with self._lock:
            return {
                "weights": self._weights,
                "staleness": dict(self._staleness),
                "refused": self._refused,
                "pulls": self._pulls,
            }


class Worker:
    """Makes gradients from examples of its own."""

    def __init__(
        self,
        server: lp.CourierClient,
        cacher: lp.CourierClient,
        seed: int,
        updates: int,
        features: int,
    ) -> None:
        self._server = server
        self._cacher = cacher
        self._rng = np.random.default_rng((1, seed))
        self._updates = updates
        self._true = true_weights(features)

    def run(self) -> int:
        """Have so many gradients accepted; return how often it pulled."""
        pulls = 0
        for _ in range(self._updates):
            x = self._rng.normal(size=(BATCH, len(self._true)))
            known = self._cacher.pull()
            pulls += 1
            while not self._server.push(
                self._gradient(known["weights"], x), known["version"]
            ):
                known = self._server.pull()  # that was too old: from the source itself
                pulls += 1
        return pulls

    def _gradient(self, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return that of the mean of (x · weights − label)² / 2."""
        return x.T @ (x @ (weights - self._true)) / BATCH


def learn(
    launch_type: str | lp.Launcher = "threads",
    *,
    workers: int = 4,
    updates: int = 500,
    features: int = 16,
    rate: float = 0.1,
    max_staleness: int = 16,
    refresh_ms: float = 2,
) -> dict[str, Any]:
    """Run the program; return the server's report.

    Args:
      launch_type: Where nodes run.
      workers: How many.
      updates: Gradients of each worker.
      features: Weights that are learnt.
      rate: Of a gradient of age 0.
      max_staleness: Updates that a gradient may have missed.
      refresh_ms: How often the cacher asks the server.
    """
    program = lp.Program("parameter_server")
    server = program.add_node(
        lp.CourierNode(ParameterServer, features, rate, max_staleness), label="server"
    )
    cacher = program.add_node(
        lp.CacherNode(server, refresh_ms, stale_after_ms=10 * refresh_ms),
        label="cacher",
    )
    with program.group("workers"):
        for seed in range(workers):
            node = lp.PyClassNode(Worker, server, cacher, seed, updates, features)
            program.add_node(node)
    with lp.launch(program, launch_type) as run:
        run.wait(labels=["workers"])
        report = server.dereference().report()  # also the script may call nodes
        pulled = sum(run.results_of("workers"))
        distance = np.linalg.norm(report["weights"] - true_weights(features))
        return {**report, "pulled": pulled, "distance": float(distance)}


def main(launch_type: str) -> None:
    found = learn(launch_type)
    print(
        f"{sum(found['staleness'].values())} updates, the oldest of age "
        f"{max(found['staleness'])}; {found['refused']} gradients refused; the server "
        f"answered {found['pulls']} of {found['pulled']} pulls; distance from the true "
        f"weights {found['distance']:.1e}"
    )


if __name__ == "__main__":
    launch_flag.run(main)
