"""Compare an IMPALA program with what it is made of, and with RLlib's.

Two actors play 16 games of Pong each and learn by the shallow network, from 32
trajectories of 20 steps at once, 84 × 84 × 4 bytes an observation. Processes of all
ways of working are there from the beginning, and take turns to run.

- `bridge_ratio`: environment steps a second of actors whose learner takes batches and
  drops them / of as many bare loops of the same environments and policy, before and
  after. `aa_ratio` is that of these loops against themselves, `bridge_cpu_ratio` that
  of steps per second of processor time, which other programs disturb less.
- `cpu_ratio`: processor time of bare acting and bare learning, for the steps that the
  real program took and learnt from, each alone / what the program took.
- `async_over_sync`: steps learnt from a second, of the program / of one process that
  acts with all games, then learns; each step waits 5 ms besides.
- `rllib_speedup`: steps learnt from a second, of the program / of RLlib's IMPALA with
  the same games, network, batch and processes. Null where it cannot be installed.

Keys that end with `_us` say where the processor time of an environment step goes:
`environment` and `inference` of the bare loops, `learn` of bare updates; `insert` is
what actors of the data plane need besides, `take` what its learner needs; `rest` is
what the program needs besides all these.
"""

import dataclasses
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from absl import app, flags

from benchmarks.actor_learner import runs
from benchmarks.actor_learner.ratios import budget_us, ratios
from benchmarks.actor_learner.rllib import environment, rllib_peer
from benchmarks.actor_learner.runs import Way
from benchmarks.actor_learner.setup import Setup
from benchmarks.actor_learner.window import Window

_ROUNDS = flags.DEFINE_integer("rounds", 9, "Interleaved windows of each.")
_WINDOW_S = flags.DEFINE_float("window_s", 4.0, "Length of a window.")
_ACTORS = flags.DEFINE_integer("actors", 2, "Processes that act.")
_GAMES = flags.DEFINE_integer("games", 16, "Of each actor.")
_BATCH = flags.DEFINE_integer("batch", 32, "Trajectories in an update.")
_UNROLL = flags.DEFINE_integer("unroll", 20, "Steps of a trajectory.")
_WAIT_S = flags.DEFINE_float("wait_s", 0.005, "Of a step, for `async_over_sync`.")
_RLLIB = flags.DEFINE_bool("rllib", True, "Measure RLlib, if it can be installed.")
_RLLIB_ROUNDS = flags.DEFINE_integer("rllib_rounds", 3, "Windows beside RLlib's.")
_RLLIB_VENV = flags.DEFINE_string(
    "rllib_venv", "runs/rllib_venv", "Where RLlib is, or is installed."
)

_RLLIB_WINDOW = 3  # times as long: it learns in bursts


def ways_of(setup: Setup, folder: Path) -> dict[str, Way]:
    """Return what takes turns, by name."""
    waiting = dataclasses.replace(setup, wait_s=_WAIT_S.value)
    return {
        "acting": Way(runs.acting_alone, setup, folder / "acting", learns=False),
        "taking": Way(runs.taking, setup, folder / "taking"),
        "updates": Way(runs.learning_alone, setup, folder / "updates", acts=False),
        "program": Way(runs.learning, setup, folder / "program"),
        "in_turn": Way(runs.in_turn, waiting, folder / "in_turn"),
        "waiting": Way(runs.learning, waiting, folder / "waiting"),
    }


def measure(
    rounds: int, seconds: float, python: Path | None, setup: Setup
) -> tuple[dict[str, list[Window]], list[float]]:
    """Return the windows of each way, and how many times as fast as RLlib it was."""
    with tempfile.TemporaryDirectory(prefix="actor-learner-") as folder:
        ways = ways_of(setup, Path(folder))
        # The bare loops on both sides of what is compared with them: others on this
        # machine come and go.
        order = ["acting", "taking", "again", *ways]
        windows: dict[str, list[Window]] = {name: [] for name in order}
        speedups: list[float] = []
        with runs.launched([*ways.values()]) as run:
            for way in ways.values():
                way.measure(run, 0.0)
            for _ in range(rounds):
                for name in windows:
                    way = ways["acting" if name == "again" else name]
                    windows[name].append(way.measure(run, seconds))
            if python is not None:
                with rllib_peer(python, setup) as peer:
                    for _ in range(_RLLIB_ROUNDS.value):
                        own = ways["program"].measure(run, _RLLIB_WINDOW * seconds)
                        theirs = peer.trained_per_s(_RLLIB_WINDOW * seconds)
                        speedups.append(own.trained_per_s / theirs)
                        print(
                            f"steps learnt from a second: {own.trained_per_s:.0f}; "
                            f"RLlib {theirs:.0f}",
                            flush=True,
                        )
        return windows, speedups


def main(argv: list[str]) -> None:
    del argv
    started_s = time.monotonic()
    setup = Setup(
        actors=_ACTORS.value,
        environments=_GAMES.value,
        unroll_length=_UNROLL.value,
        batch_size=_BATCH.value,
    )
    python = environment(Path(_RLLIB_VENV.value).absolute()) if _RLLIB.value else None
    windows, speedups = measure(_ROUNDS.value, _WINDOW_S.value, python, setup)
    found = ratios(windows)
    result: dict[str, object] = {}
    for name, each in found.items():
        print(f"{name}: {each}")
        result |= {name: round(each.median, 3), f"{name}_low": round(each.low, 3)}
    result["rllib_speedup"] = round(float(np.median(speedups)), 2) if speedups else None
    for name, each in windows.items():
        what = "acted_per_s" if name in ("acting", "again") else "trained_per_s"
        result[f"{name}_per_s"] = round(
            float(np.median([getattr(window, what) for window in each]))
        )
    result |= {
        f"{part}_us": round(used, 1) for part, used in budget_us(windows).items()
    }
    result["seconds"] = round(time.monotonic() - started_s, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
