"""Environments that are JAX functions: acting and learning are one compiled step.

Hessel et al. 2021, "Podracer architectures for scalable reinforcement learning", §2.
"""

import collections
import time
from pathlib import Path
from typing import Any

import numpy as np

import replicator
from experiments import run_folder
from experiments.returns import Learned, Returns
from replicator.base.types import InitFn, StepFn

_READ_LATE = 2  # steps, so that the device is not waited for


def learn(
    rep: replicator.Replicator,
    init_fn: InitFn,
    step_fn: StepFn,
    *,
    environments: int,
    steps: int,
    seed: int,
    folder: Path | None,
) -> Learned:
    """Run a step that acts and learns until it has made its updates.

    Args:
      rep: Where it runs.
      init_fn: Makes its state, with `params`.
      step_fn: The step: its batch is the environments' numbers, int32, and its metrics
        have `gained` and `ended`, each episode's return and where one has ended.
      environments: In all; each replica has its share.
      steps: Calls of it.
      seed: Of everything.
      folder: Where returns and checkpoints are kept; None keeps nothing.
    """
    began = time.perf_counter()
    numbers = np.arange(environments, dtype=np.int32)
    waiting: collections.deque[Any] = collections.deque()
    with rep.session(
        step_fn,
        init_fn=init_fn,
        steps=steps,
        seed=seed,
        display=False,
        **run_folder.saved_in(folder),
    ) as session:
        returns = Returns(folder, updates=session.steps_done)

        def note(update: int, metrics: Any) -> None:
            ended = np.asarray(metrics["ended"]).ravel()
            returns.add(update, np.asarray(metrics["gained"]).ravel()[ended])

        for update in session.steps():
            waiting.append((update, session.step(numbers)))
            if len(waiting) > _READ_LATE:
                note(*waiting.popleft())
        for each in waiting:
            note(*each)
    return returns.learned(session.result, since=began)
