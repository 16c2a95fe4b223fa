"""A program of Acme's parts: actors that count their steps, and what limits them.

Run by `test_acme.py` with Acme's own source on the path of modules.
"""

import json
import os
import signal
import time
from pathlib import Path

import dm_env
import launchpad as lp
import numpy as np
from absl import app, flags
from acme import core, environment_loop, specs
from acme.utils import counting, loggers, lp_utils

STEPS = 5  # of an episode
DEATH = 5  # episodes before it
_FOLDER = flags.DEFINE_string("folder", "", "Where episodes and counts are noted.")
_DIES = flags.DEFINE_bool("dies", False, "Whether an actor is killed in an episode.")


class Coins(dm_env.Environment):
    """Episodes of five steps; each is noted before it is counted."""

    def __init__(self, folder, dies, waits):
        self._folder, self._dies, self._waits = Path(folder), dies, waits
        self._step = self._episodes = 0

    def reset(self):
        self._step = 0
        return dm_env.restart(np.zeros(1, np.float32))

    def step(self, action):
        self._step += 1
        time.sleep(0.005)  # leaves the machine to others
        died = self._folder / "died"
        while self._waits and self._episodes == DEATH and not died.exists():
            time.sleep(0.01)  # or the limiter may come before the death
        is_time = (self._episodes, self._step) == (DEATH, 3)
        if self._dies and is_time and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        seen = np.full(1, self._step, np.float32)
        if self._step < STEPS:
            return dm_env.transition(1.0, seen)
        self._episodes += 1
        note(self._folder / "episodes", ".")
        return dm_env.termination(1.0, seen)

    def observation_spec(self):
        return specs.Array((1,), np.float32)

    def action_spec(self):
        return specs.DiscreteArray(2)


class Guess(core.Actor):
    """Guesses."""

    def select_action(self, observation):
        return 0

    def observe_first(self, timestep):
        pass

    def observe(self, action, next_timestep):
        pass

    def update(self, wait=False):
        pass


class Notes(loggers.Logger):
    """Notes what an actor was told that all of them have counted."""

    def __init__(self, folder):
        self._path = Path(folder) / "counted"

    def write(self, data):
        counts = {name: int(data[name]) for name in ("actor_steps", "actor_episodes")}
        note(self._path, json.dumps(counts) + "\n")

    def close(self):
        pass


def note(path, text):
    """Add to a file by one call, so a kill leaves whole lines."""
    with open(path, "ab", buffering=0) as file:
        file.write(text.encode())


def make_actor(counter, folder, dies, waits):
    counter = counting.Counter(counter, prefix="actor", time_delta=0.0)
    environment = Coins(folder, dies, waits)
    return environment_loop.EnvironmentLoop(
        environment, Guess(), counter=counter, logger=Notes(folder)
    )


def main(_):
    folder = _FOLDER.value
    program = lp.Program("acme")
    with program.group("counter"):
        counter = program.add_node(lp.CourierNode(counting.Counter))
    # All that is not Launchpad's: without it the death of an actor ends the program.
    again = {"restart": lp.Restart(attempts=1)} if _DIES.value else {}
    with program.group("actor", **again):
        for index in range(2):
            dies, waits = (_DIES.value and index == each for each in range(2))
            program.add_node(lp.CourierNode(make_actor, counter, folder, dies, waits))
    with program.group("limiter"):
        program.add_node(lp.CourierNode(lp_utils.StepsLimiter, counter, 100))
    lp.launch(program)


if __name__ == "__main__":
    app.run(main)
