"""Runs of one agent, seed after seed, that go on after a kill; a table of all.

What a seed's run has learned is kept in a folder of its own until all seeds have ended;
what is left then are pictures, and the next run begins anew.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments import run_folder
from experiments.drawing import draw_curves
from experiments.returns import Learned, average_of

_LAST = 100  # episodes, over which returns are averaged

# What may differ from sitting to sitting: the state learns the same, but for the rate,
# which falls to 0 where `steps` ends.
FREE = {"launch_type", "actors", "seeds", "first_seed", "steps", "directory"}


def folder_of(config: Any, seed: int) -> Path | None:
    """Return where a seed's run is kept; None if nothing is."""
    return Path(config.directory) / f"seed-{seed}" if config.directory else None


def options_of(config: Any, seed: int) -> dict[str, Any]:
    """Return the options of a seed's run at any scale.

    Args:
      config: Of the experiment, with `environments`, `unroll_length`, `steps` and
        `directory`; without `batch_size`, each unroll is one batch.
      seed: Of the run.
    """
    return {
        "batch_size": getattr(config, "batch_size", config.environments),
        "unroll_length": config.unroll_length,
        "steps": config.steps,
        "seed": seed,
        "folder": folder_of(config, seed),
    }


def run_all(config: Any, run: Callable[[int], Learned]) -> dict[int, Learned]:
    """Run one seed after the other, and print how each went.

    Args:
      config: Of the experiment, with `seeds`, `first_seed` and `directory`.
      run: Runs a seed.

    Raises:
      ArgumentError: The folder of a seed is that of a run with other settings.
    """
    numbers = range(config.first_seed, config.first_seed + config.seeds)
    for folder in filter(None, (folder_of(config, seed) for seed in numbers)):
        run_folder.claim(folder, config, free=FREE)
    outcomes = {}
    for seed in numbers:
        outcomes[seed] = found = run(seed)
        average = average_of(found.returns, _LAST)
        gained = "no episode" if average is None else f"return {average:.2f}"
        print(
            f"seed {seed}: {gained} after {found.updates} updates, "
            f"{len(found.returns)} episodes, {found.seconds:.1f} s",
            flush=True,
        )
    return outcomes


def print_outcomes(
    config: Any,
    outcomes: dict[int, Learned],
    *,
    title: str,
    replicas: int,
    chance: float | None = None,
    evaluated: list[float] | None = None,
    per_update: float = 0.0,
) -> None:
    """Draw the curves, print the last line, and let the next run begin anew.

    Args:
      config: Of the experiment.
      outcomes: Of `run_all`.
      title: Over the curves.
      replicas: That learned.
      chance: Return of a random player; None draws no line.
      evaluated: Average return of each seed's policy; those of the last episodes where
        it is None.
      per_update: Steps of environments that were taken for an update; 0 counts none.
    """
    if config.directory:
        draw_curves(
            {f"seed {seed}": found.returns for seed, found in outcomes.items()},
            Path(config.directory) / "learning_curve.png",
            title=f"{title} ({config.scale})",
            window=_LAST if evaluated is None else 1 + _LAST // 10,
            chance=chance,
        )
    averages = evaluated or [
        average_of(found.returns, _LAST) for found in outcomes.values()
    ]
    known = [each for each in averages if each is not None]
    found = {
        "average_return": min(known) if known == averages else None,
        "median_return": float(np.median(known)) if known == averages else None,
        "seconds": max(each.seconds for each in outcomes.values()),
        "scale": config.scale,
        "replicas": replicas,
        "steps": max(each.updates for each in outcomes.values()),
    }
    if per_update:
        found["steps_per_s"] = per_update * min(
            (each.updates - each.begun) / each.seconds for each in outcomes.values()
        )
    if evaluated is not None:
        found["returns"] = evaluated
    print(json.dumps(found), flush=True)
    for seed in outcomes:
        if folder := folder_of(config, seed):
            shutil.rmtree(folder)
