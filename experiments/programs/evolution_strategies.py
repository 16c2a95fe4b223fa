"""Teach a network to balance a pole by trying random changes of all its weights.

    evolver ── evaluate(weights, noise, seed): arrays there, an array back ──▶ workers

At each generation every row of noise is tried in both directions, +σε and −σε, each by
a worker in a simulated cart-pole. Ranks of what they scored, not scores, weigh the
noise into a gradient. Workers share nothing, no gradient is computed, and the result is
the same for any number of them.

T. Salimans, J. Ho, X. Chen, S. Sidor and I. Sutskever, "Evolution Strategies as a
Scalable Alternative to Reinforcement Learning", 2017 (they send seeds in place of
noise). Antithetic pairs and centered ranks are theirs. The cart-pole is that of A.
Barto, R. Sutton and C. Anderson, "Neuronlike Adaptive Elements", 1983.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

import replicator.launchpad_bridge as lp
from experiments.programs import launch_flag

HIDDEN = 8
WEIGHTS = 4 * HIDDEN + HIDDEN  # from four numbers of the state, to one force
LONGEST = 500
"""Steps after which an episode ends with the pole still up; ten seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evolution:
    """Settings of the search.

    Attributes:
      generations: Steps.
      pairs: Rows of noise per generation, each tried in both directions.
      episodes: Starts from which each is tried, all from the same ones.
      sigma: Size of the noise.
      rate: Of a step.
      seed: Of noise and starts.
    """

    generations: int = 25
    pairs: int = 32
    episodes: int = 4
    sigma: float = 0.3
    rate: float = 0.5
    seed: int = 0


def balance(policies: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Play every policy from every start, all side by side.

    Args:
      policies: [n, WEIGHTS], each a network with one hidden layer.
      starts: [m, 4]: place, speed, angle in radians, its speed.

    Returns:
      [n]: for how many steps the pole stayed up, in the mean over starts.
    """
    first = policies[:, : 4 * HIDDEN].reshape(-1, 4, HIDDEN)
    second = policies[:, 4 * HIDDEN :, None]
    states = np.repeat(starts[None], len(policies), axis=0)
    steps = np.zeros(states.shape[:2], int)
    up = np.ones(states.shape[:2], bool)
    while up.any() and steps.max() < LONGEST:
        steps += up
        pushes = np.where((np.tanh(states @ first) @ second)[..., 0] > 0, 10.0, -10.0)
        states = _after(states, pushes)
        up &= (np.abs(states[..., 0]) < 2.4) & (np.abs(states[..., 2]) < np.pi / 15)
    return steps.mean(axis=1)


def _after(states: np.ndarray, pushes: np.ndarray) -> np.ndarray:
    """Return the states 20 ms later: a pole of 0.1 kg and 1 m on a cart of 1 kg."""
    _, speeds, angles, turns = np.moveaxis(states, -1, 0)
    sin, cos = np.sin(angles), np.cos(angles)
    drag = (pushes + 0.05 * turns**2 * sin) / 1.1
    falls = (9.8 * sin - cos * drag) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    shoves = drag - 0.05 * falls * cos / 1.1
    return states + 0.02 * np.stack([speeds, shoves, turns, falls], axis=-1)


def draw_starts(seed: int, count: int) -> np.ndarray:
    """Return starts [count, 4] near the upright rest."""
    return np.random.default_rng((1, seed)).uniform(-0.05, 0.05, size=(count, 4))


def first_weights(seed: int) -> np.ndarray:
    """Return small random weights: at zero, +ε and −ε would be the same policy."""
    return 0.1 * np.random.default_rng((2, seed)).normal(size=WEIGHTS)


def centered_ranks(scores: np.ndarray) -> np.ndarray:
    """Return ranks from −0.5 to 0.5; those of equal scores are equal."""
    below = (scores[:, None] > scores).sum(axis=1)
    above = (scores[:, None] < scores).sum(axis=1)
    return (below - above) / (2 * (len(scores) - 1))


class Worker:
    """Plays what it is given."""

    def evaluate(
        self, weights: np.ndarray, noise: np.ndarray, seed: int, episodes: int
    ) -> np.ndarray:
        """Return scores [2, rows] of weights + noise and weights − noise."""
        policies = np.concatenate([weights + noise, weights - noise])
        return balance(policies, draw_starts(seed, episodes)).reshape(2, -1)


class Evolver:
    """Draws noise, hands it out, and moves the weights to where scores are higher."""

    def __init__(
        self, workers: Sequence[lp.CourierClient], evolution: Evolution
    ) -> None:
        self._workers = workers
        self._evolution = evolution

    def run(self) -> dict[str, Any]:
        """Evolve; return the weights and the mean score of each generation."""
        options = self._evolution
        weights, means = first_weights(options.seed), []
        for generation in range(options.generations):
            rng = np.random.default_rng((0, options.seed, generation))
            noise = options.sigma * rng.normal(size=(options.pairs, WEIGHTS))
            scores = self._scores(weights, noise, generation)
            means.append(float(scores.mean()))
            plus, minus = centered_ranks(scores.ravel()).reshape(2, -1)
            scale = 2 * options.pairs * options.sigma**2
            weights = weights + options.rate * (plus - minus) @ noise / scale
        lp.stop()
        return {"weights": weights, "means": means}

    def _scores(
        self, weights: np.ndarray, noise: np.ndarray, generation: int
    ) -> np.ndarray:
        options, seed = self._evolution, 1000 * self._evolution.seed + generation
        shares = np.array_split(noise, len(self._workers))
        calls = [
            worker.futures.evaluate(weights, share, seed, options.episodes)
            for worker, share in zip(self._workers, shares, strict=True)
        ]
        return np.concatenate([call.result() for call in calls], axis=1)


def evolve(
    launch_type: str | lp.Launcher = "threads",
    *,
    workers: int = 4,
    evolution: Evolution | None = None,
) -> dict[str, Any]:
    """Run the program; return the weights, and the mean score of each generation."""
    program = lp.Program("evolution_strategies")
    with program.group("workers"):
        handles = [program.add_node(lp.CourierNode(Worker)) for _ in range(workers)]
    evolver = lp.PyClassNode(Evolver, handles, evolution or Evolution())
    program.add_node(evolver, label="evolver")
    with lp.launch(program, launch_type) as run:
        run.wait()
        return run.results["evolver"]


def main(launch_type: str) -> None:
    found = evolve(launch_type)
    policies = np.stack([first_weights(Evolution().seed), found["weights"]])
    before, after = balance(policies, draw_starts(seed=999_999, count=100))
    print(
        f"the pole stayed up for {0.02 * before:.1f} s before and {0.02 * after:.1f} s "
        f"after {len(found['means'])} generations, of at most {0.02 * LONGEST:.0f} s, "
        "in the mean over 100 new starts"
    )


if __name__ == "__main__":
    launch_flag.run(main)
