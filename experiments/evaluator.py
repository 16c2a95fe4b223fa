"""Play whole episodes of a policy: when a run ends, or in a node while it learns."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from experiments.returns import Learned, Returns
from replicator.base.types import PyTree
from replicator.launchpad_bridge import acting
from replicator.launchpad_bridge.acting.waiting import ProgramStoppedError, Waiting

NAME = "evaluations.jsonl"
_INDEX = 1 << 20  # of no actor: its episodes are nobody else's

Choose: TypeAlias = Callable[..., np.ndarray]
"""`choose(observation, first, t)` returns actions [n]."""


def play(
    environment: acting.VectorEnvironment,
    choose: Choose,
    *,
    seed: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Return the returns of the first episode of each of n environments.

    Args:
      environment: They are played all at once.
      choose: Chooses their actions.
      seed: Of the environments.
      is_stopped: Asked at each step; returns are left out then.
    """
    step, t = environment.reset(seed), 0
    returns = np.zeros(environment.size)
    goes_on = np.ones(environment.size, bool)
    while goes_on.any():
        if is_stopped():
            return []
        step = environment.step(choose(step.observation, step.first, t))
        returns += step.reward * goes_on
        goes_on &= ~step.last
        t += 1
    return returns.tolist()


def evaluated(
    environment: acting.VectorEnvironment,
    policy: acting.Policy,
    initial_core: Callable[[int], PyTree],
    outcomes: dict[int, Learned],
) -> list[float]:
    """Return the mean return of an episode of each environment, of each seed's policy.

    Args:
      environment: They are played all at once.
      policy: That is played.
      initial_core: Of the policy.
      outcomes: Of each seed.
    """
    gained, size = [], environment.size
    for seed, found in outcomes.items():
        choose = player(policy, initial_core, found.params, size=size, seed=seed)
        at = acting.environment_seed(seed, _INDEX)
        gained.append(float(np.mean(play(environment, choose, seed=at))))
    return gained


def player(
    policy: acting.Policy,
    initial_core: Callable[[int], PyTree],
    params: PyTree,
    *,
    size: int,
    seed: int,
) -> Choose:
    """Return a `choose` that acts by a policy, for so many environments."""
    act = acting.LocalInference(policy, seed=seed, index=1)
    act.use({"params": params})
    core = initial_core(size)

    def choose(observation: np.ndarray, first: np.ndarray, t: int) -> np.ndarray:
        nonlocal core
        action, _, core = act(observation, first, core, t)
        return np.asarray(action)

    return choose


class Evaluator:
    """Plays an episode of the newest policy, as often as there is one; logs returns."""

    def __init__(
        self,
        make_environment: Callable[[int], acting.VectorEnvironment],
        policy: acting.Policy,
        initial_core: Callable[[int], PyTree],
        folder: Path,
        seed: int,
        learner: Any,
    ) -> None:
        """Make an environment of its own.

        Args:
          make_environment: Takes how many.
          policy: That is played.
          initial_core: Of the policy.
          folder: Where returns go.
          seed: Of the run; episodes have seeds that no actor has.
          learner: Client of whose policy is played.
        """
        self._environment = make_environment(1)
        self._policy, self._initial_core = policy, initial_core
        self._folder, self._seed, self._learner = folder, seed, learner

    def run(self) -> None:
        """Play until the program stops; also while the learner starts again."""
        with contextlib.suppress(ProgramStoppedError):
            self._run(Waiting.of_node(None, "evaluator"))

    def _run(self, waiting: Waiting) -> None:
        version, number = None, 0
        found_so_far = Returns(self._folder, name=NAME)
        while not waiting.stop.is_set():
            found = waiting.newest_variables(self._learner, version)
            if found is None:
                continue
            version, params = found.version, found.values["params"]
            given = (self._policy, self._initial_core, params)
            choose = player(*given, size=1, seed=self._seed)
            seed = acting.environment_seed(self._seed, _INDEX, number=number)
            stopped = waiting.stop.is_set
            gained = play(self._environment, choose, seed=seed, is_stopped=stopped)
            found_so_far.add(version, gained)
            number += 1
