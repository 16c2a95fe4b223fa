"""Compare loops of one's own, in a session, with `run`; and kill one at random moments.

Two loops are timed against `rep.run` with the same step, in turn, in one process:
`step_ratio_low` is of one that lets the session make the step, `ratio_low` of one with
a step of its own, which it says when it is done. Both have what a run has; display and
files are off.

Then a loop with a step of its own is killed by SIGKILL, again and again, as
`kill_resume` does with runs: while it starts, in a save, in a restore and between its
steps. `failures` counts the times that its final bits were not those of a
loop that nobody killed, or that more steps were lost than one interval.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from absl import app, flags

import replicator
from benchmarks.kill_resume import Found, kill_again_and_again
from benchmarks.runs.killing import start
from benchmarks.step.run_against import OURS, time_run_against
from benchmarks.step.step_pair import replicator_init, replicator_step
from benchmarks.tasks import digits_resnet
from benchmarks.timing import ratio
from replicator.base.types import PyTree
from replicator.hooks import Hook
from replicator.training.session import Session

DEVICES = 8
_ROUNDS = flags.DEFINE_integer("rounds", 30, "Interleaved blocks of each loop.")
_STEPS = flags.DEFINE_integer("steps", 20, "Steps per block.")
_KILLS_OF_ONE = 5


def time_sessions(rounds: int, steps: int) -> dict[str, list[float]]:
    """Time `rep.run`, and two loops in sessions, on the same task."""
    rep, task = replicator.Replicator(), digits_resnet(64, width=2)
    optimizer = rep.wrap_optimizer(optax.adamw(1e-3))
    step_fn = replicator_step(task, optimizer)
    options: dict[str, Any] = {
        "init_fn": replicator_init(task, optimizer),
        "steps": (rounds + 2) * steps,
        # While others have their turn each may read ahead no more than this.
        "inputs": replicator.InputOptions(prefetch=2),
        "gradient_norm": False,  # which a step of one's own does not report
        "display": False,
    }

    def run(hook: Hook) -> None:
        rep.run(step_fn, [task.batch], hooks=[hook], **options)

    with ExitStack() as sessions:
        whole = sessions.enter_context(rep.session(step_fn, [task.batch], **options))
        own = sessions.enter_context(rep.session(dataset=[task.batch], **options))
        train = own.compile(step_fn)

        def own_step(batch: PyTree) -> None:
            own.after(train(batch))

        others = {
            "session": _block(whole, whole.step, steps),
            "own step": _block(own, own_step, steps),
        }
        return time_run_against(run, others, steps_per_block=steps)


def _block(
    session: Session, turn: Callable[[PyTree], object], steps: int
) -> Callable[[], None]:
    batches = session.batches()

    def block() -> None:
        for _ in range(steps):
            turn(next(batches))
        jax.block_until_ready(session.state)

    return block


def kill_sessions(kills: int, rng: np.random.Generator) -> Found:
    """Kill loops in sessions so many times, and say what that did."""
    found = Found()
    with tempfile.TemporaryDirectory() as name:
        # The first one warms the compilation cache; the second one is timed.
        cold, whole = (
            start(Path(name) / turn, processes=1, loop="session")
            for turn in ("cold", "warm")
        )
        if whole.digest is None or whole.digest != cold.digest:
            sys.exit(f"two whole loops did not end alike: {whole.errors}")
        for turn in itertools.count():
            if found.kills >= kills or found.failures:
                break
            kill_again_and_again(
                Path(name) / f"killed{turn}",
                whole,
                found,
                kills=min(_KILLS_OF_ONE, kills - found.kills),
                processes=1,
                rng=rng,
                loop="session",
            )
    return found


def main(argv: list[str]) -> None:
    del argv
    found = kill_sessions(flags.FLAGS.kills, np.random.default_rng(flags.FLAGS.seed))
    replicator.fake_devices(DEVICES)
    times_s = time_sessions(_ROUNDS.value, _STEPS.value)
    own = ratio(times_s["own step"], times_s[OURS])
    whole = ratio(times_s["session"], times_s[OURS])
    print(f"a step of one's own / run {own}, the session's step / run {whole}")
    result = {
        "ratio": round(own.median, 4),
        "ratio_low": round(own.low, 4),
        "step_ratio": round(whole.median, 4),
        "step_ratio_low": round(whole.low, 4),
        "failures": found.failures,
        "kills": found.kills,
        "killed_in": dict(found.killed_in),
        "lost_steps": found.lost_steps,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
