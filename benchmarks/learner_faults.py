"""Kill one worker of a learner's program at a random moment, again and again.

In each round a program of actors, a table and a learner, of one process or of two, runs
on real processes; one of them gets SIGKILL, in a third of the rounds SIGTERM: while all
start, or a while after an update that is drawn; in a quarter of the rounds soon after
that another one, or the same. After SIGTERM no update is made again. The run must make
all its updates, each once, and the learner go on from its newest durable checkpoint or
later. Where actors take turns the final variables are those of a run that nobody
killed, bit for bit, wherever the table is; such a run is made once for each number of
processes, of a replay table and of another one. So is what its actors have played
(returns, lengths, steps). The step updates twice in a scan, as PPO does.

A replay table of turns has its rows counted at the end. Without turns, each priority of
the learner that makes the last update must get back to the table. It saves its rows
twice a second: those in its last save before a kill must be there after the run, but
for the oldest, of which as many may have gone as it counts; and no count may be below
that of the save.

`restart_s` is the time from the kill of one of the learner's two processes to the next
update of both, the longest and `restart_median_s` the median; `restart_one_s` that of a
learner of one process, the median. `lost` counts trajectories: `unanswered` inserts
whose answer never came, those `held` by a queue that was killed, or by a replay table
since its last save, those that the queue dropped as `too_new`, acted with variables
that a killed learner had and lost; and updates that were made again, `redone`. `saved`
counts the rows in the last saves of the replay tables that were killed.
"""

import collections
import dataclasses
import json
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from benchmarks.runs.killed_learner import Case, Kill, Outcome, cases, problems, run
from benchmarks.runs.learner_program import INTERVAL, STEPS, Shape

_ROUNDS = flags.DEFINE_integer("rounds", 40, "Runs that lose a worker.")
_LIMIT_S = flags.DEFINE_float("limit_s", 120.0, "Seconds that a run may take.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the moments, and of the order of cases.")
_ONLY = flags.DEFINE_string("only", "", "Cases whose names hold this; all by default.")
_STARTS = 0.25  # of the rounds that kill while the program starts
_WHILE_S = 0.1  # between an update and the kill
_TWICE = 0.25  # of the rounds that kill again,
_TERMS = 1 / 3  # of the rounds that preempt instead
_AGAIN_S = 4.0  # within this time: somebody starts again, or looks for who does


@dataclasses.dataclass(kw_only=True, slots=True)
class Found:
    """Totals of all rounds."""

    rounds: int = 0
    kills: int = 0
    preempted: int = 0
    failures: int = 0
    saved: int = 0
    restarts: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    lost: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    restart_s: list[float] = dataclasses.field(default_factory=list)
    restart_one_s: list[float] = dataclasses.field(default_factory=list)


def draw_kills(case: Case, whole: Outcome, rng: random.Random) -> list[Kill]:
    """Draw when to kill, from what a run took that nobody killed."""
    if rng.random() < _STARTS:
        update, after_s = None, rng.uniform(0.0, whole.first_update_s)
    else:
        update, after_s = rng.randrange(STEPS - INTERVAL), rng.uniform(0.0, _WHILE_S)
    is_term = rng.random() < _TERMS
    signum = signal.SIGTERM if is_term else signal.SIGKILL
    kills = [Kill(victim=case.victim, update=update, after_s=after_s, signum=signum)]
    if rng.random() < _TWICE:
        others = [each.victim for each in cases() if each.shape == case.shape]
        after_s = rng.uniform(0.0, _AGAIN_S)
        victim = rng.choice(others)
        kills.append(Kill(victim=victim, update=None, after_s=after_s, signum=signum))
    return kills


def play(case: Case, whole: Outcome, rng: random.Random, found: Found) -> None:
    """Make a round; count what happened, and say it."""
    kills = draw_kills(case, whole, rng)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="learner-faults-") as folder:
        outcome = run(case.shape, Path(folder), limit_s=_LIMIT_S.value, kills=kills)
    wrong = problems(outcome, case.victim)
    if not wrong and case.shape.turns and not _same_end(outcome, whole):
        wrong.append("other bits than the run that nobody killed")
    lost = lost_in(outcome)
    preempted = [k for k in kills if k.signum == signal.SIGTERM]
    if preempted and lost["redone"]:
        wrong.append(f"{lost['redone']} updates were made again after SIGTERM")
    found.rounds += 1
    found.kills += len(kills)
    found.preempted += len(preempted)
    found.failures += bool(wrong)
    found.lost.update(lost)
    if case.victim == "replay":
        found.saved += sum(len(save.keys) for save in outcome.saves[:1])
    # Of each worker's group: a learner of two processes starts again as one.
    found.restarts.update({name.split("/")[0] for name in outcome.restarts})
    resumed_s = outcome.resumed_s
    if resumed_s is not None and case.victim.startswith("learner") and not kills[1:]:
        times_s = found.restart_one_s if case.victim == "learner" else found.restart_s
        times_s.append(resumed_s)
    when = "SIGTERM, " * bool(preempted)
    when += "starting" if kills[0].update is None else f"after {kills[0].update}"
    when += "".join(f", {kill.victim} {kill.after_s:.1f} s later" for kill in kills[1:])
    print(
        f"{found.rounds:3} {case.name}, {when}: {time.monotonic() - began_s:.0f} s"
        + (f", resumed in {resumed_s:.1f} s" if resumed_s is not None else "")
        + "".join(f", {count} {what}" for what, count in lost.items() if count)
        + "".join(f"\n  FAILED: {problem}" for problem in wrong),
        flush=True,
    )


def _same_end(one: Outcome, other: Outcome) -> bool:
    """Return whether two runs ended with the same variables and plays, bit for bit."""
    played = ("episodes", "episode_return", "environment_steps", "episode_length")
    ends = [
        # Of a replay table no steps are counted.
        (each.result["variables"], [each.result["metrics"].get(k, -1) for k in played])
        for each in (one, other)
    ]
    pairs = zip(*map(jax.tree.leaves, ends), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def lost_in(outcome: Outcome) -> dict[str, int]:
    """Count what a run lost, by where."""
    before, after = outcome.updates(0), outcome.updates(1)
    redone = before[-1]["step"] - after[0]["step"] + 1 if before and after else 0
    return {
        "unanswered": sum(actor["lost"] for actor in outcome.actors),
        "held": outcome.held,
        "too_new": outcome.table.get("dropped", {}).get("too_new", 0),
        "redone": redone,
    }


def undisturbed(shape: Shape, found: Found) -> Outcome:
    """Return a run that nobody killed."""
    with tempfile.TemporaryDirectory(prefix="learner-faults-") as folder:
        outcome = run(shape, Path(folder), limit_s=_LIMIT_S.value)
    for problem in problems(outcome, None):
        print(f"  FAILED undisturbed: {problem}", flush=True)
        found.failures += 1
    if outcome.result is None:
        raise SystemExit("A run that nobody killed did not end.")
    return outcome


def main(argv: list[str]) -> None:
    del argv
    rng, found = random.Random(_SEED.value), Found()
    chosen = [case for case in cases() if _ONLY.value in case.name]
    rng.shuffle(chosen)
    began_s = time.monotonic()
    whole: dict[tuple[int, bool], Outcome] = {}
    for number in range(_ROUNDS.value):
        case = chosen[number % len(chosen)]
        processes, turns = case.shape.processes, case.shape.turns
        replays = case.shape.replays and turns  # else only its times are of interest
        if (processes, replays) not in whole:
            shape = Shape(
                turns=True, processes=processes, own_table=False, replays=replays
            )
            whole[processes, replays] = undisturbed(shape, found)
        play(case, whole[processes, replays], rng, found)
    both_s, one_s = found.restart_s, found.restart_one_s
    result = {
        "failures": found.failures,
        "rounds": found.rounds,
        "kills": found.kills,
        "preempted": found.preempted,
        "restart_s": round(max(both_s), 2) if both_s else None,
        "restart_median_s": round(statistics.median(both_s), 2) if both_s else None,
        "restart_one_s": round(statistics.median(one_s), 2) if one_s else None,
        "restarts": dict(sorted(found.restarts.items())),
        "lost": dict(found.lost),
        "saved": found.saved,
        "seconds": round(time.monotonic() - began_s, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
