"""Kill runs at random moments, start them again, and look at what was lost: nothing.

A run trains a small model with a checkpoint every few steps: one process the digits
ResNet, two an MLP. All its processes are killed by SIGKILL, again and again: half of
the times once a save began to write, else in turn while it starts, in a restore and
between its steps, each time after a random while, within the time that the aim takes.
Then it may end: its final bits must be those of a run that nobody killed. After
each kill it goes on from the newest checkpoint that was whole, at least from the last
save but one that it began: on a busy disk a save may take longer than an interval, and
those that are due meanwhile are left out. By SIGTERM nothing may be lost.

With `--store=s3` the checkpoints lie in a bucket: moto's server, in this process.

`killed_in` counts what the kills met: `save` while one was written (`in_saves` is the
same number; `half_written` of them left files of it, or its intent in a bucket),
`restore` while a checkpoint was looked for and read, `end` behind the last step, else
`start` or `steps`. `aimed_at` counts what they were to meet.
`first_step_s` is the time from `exec` to the end of the first new step of the digits
ResNet, with a warm compilation cache, less what the imports of jax, flax and
tensorstore take by themselves; in a bucket it is `first_step_in_bucket_s`.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
from absl import app, flags

from benchmarks.runs.faulty_buckets import (
    BUCKET,
    ENVIRONMENT,
    environment,
    serving_s3,
)
from benchmarks.runs.killing import INTERVAL, STEPS, Attempt, Moment, start
from replicator.base.host.clock import SystemClock
from replicator.checkpoint.buckets.bucket import Bucket
from replicator.checkpoint.buckets.url import parse_url
from replicator.checkpoint.directories.named import open_directory
from replicator.exit_codes import PREEMPTED

_KILLS = flags.DEFINE_integer("kills", 20, "SIGKILLs in all.")
_PER_RUN = flags.DEFINE_integer("kills_per_run", 5, "SIGKILLs of one run.")
_PROCESSES = flags.DEFINE_multi_integer("processes", [1, 2], "Processes, in turn.")
_TERMS = flags.DEFINE_integer("terms", 4, "SIGTERMs in all, of one process each.")
_STARTS = flags.DEFINE_integer("starts", 5, "Starts that are timed.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the moments.")
_STORE = flags.DEFINE_enum("store", "file", ["file", "s3"], "What checkpoints lie in.")
IMPORTS = "import jax, flax.nnx, tensorstore"
# A save is short, so half of the kills aim at one.
_AIMS = ("save", "steps", "save", "restore", "save", "start")
Directory: TypeAlias = Path | str
"""A folder, or the URL of one in a bucket."""

_KEYS = ("steps", "save", "restore", "start", "end")


@dataclasses.dataclass(kw_only=True)
class Found:
    """Totals of all kills."""

    aimed_at: Counter[str] = dataclasses.field(default_factory=Counter)
    killed_in: Counter[str] = dataclasses.field(default_factory=Counter)
    half_written: int = 0
    failures: int = 0
    lost_steps: int = 0
    lost_on_sigterm: int = 0

    @property
    def kills(self) -> int:
        """Number of kills."""
        return self.killed_in.total()

    def fail(self, problem: str) -> None:
        """Count a failure, and say what it was."""
        print(f"  FAILED: {problem}", flush=True)
        self.failures += 1


def draw_moment(
    aim: str, whole: Attempt, reached: int, rng: np.random.Generator
) -> Moment:
    """Draw when to kill a run.

    Args:
      aim: What the kill shall meet.
      whole: A run of the same program that nobody killed.
      reached: The last step that the run has made so far.
      rng: Where chance comes from.
    """
    match aim:
        case "start":
            after_s = float(rng.uniform(0, whole.first_step_s))
            return Moment(told={}, after_s=after_s)
        case "restore":
            after_s = float(rng.uniform(0, whole.restore_s))
            return Moment(told={"phase": "restore"}, after_s=after_s)
        case "save":
            # The first of this start or the second, so that there are some to restore.
            left = max(1, (STEPS - reached) // INTERVAL)
            times = int(rng.integers(1, 1 + min(2, left)))
            after_s = float(rng.uniform(0, whole.save_s))
            return Moment(told={"what": "saving"}, times=times, after_s=after_s)
        case _:
            step = min(reached + int(rng.integers(1, INTERVAL)), STEPS - 1)
            return Moment(told={"what": "dispatched", "step": step}, after_s=0.0)


def kill_again_and_again(
    directory: Directory,
    whole: Attempt,
    found: Found,
    *,
    kills: int,
    processes: int,
    rng: np.random.Generator,
    loop: str = "run",
) -> None:
    """Kill one run so many times, let it end, and compare its bits."""
    reached = kept = 0
    for _ in range(kills):
        aim = _AIMS[found.kills % len(_AIMS)]
        moment = draw_moment(aim, whole, reached, rng)
        left = half_written(directory)
        attempt = start(directory, processes=processes, moment=moment, loop=loop)
        _look_at_start(attempt, kept, found)
        steps = f"steps {attempt.first_step} to {attempt.last_step}"
        if attempt.exit_codes[0] == -signal.SIGKILL:
            is_cut_off = bool(half_written(directory) - left)
            in_save = is_cut_off or attempt.is_saving
            what = "save" if in_save else what_it_did(attempt)
            found.half_written += is_cut_off
            found.aimed_at[aim] += 1
            found.killed_in[what] += 1
            print(f"  killed in {what} (aim: {aim}): {steps}", flush=True)
        elif attempt.exit_codes[0] != 0:
            found.fail(f"it ended by itself: {attempt.errors}")
        else:  # the last step was done before the moment came
            break
        reached = max(reached, attempt.last_step)
        kept = max([kept, *whole_steps(directory), *attempt.saved[-2:-1]])
    last = start(directory, processes=processes, loop=loop)
    _look_at_start(last, kept, found)
    if last.digest != whole.digest:
        found.fail(f"final bits {last.digest}, not {whole.digest}; {last.errors}")


def half_written(directory: Directory) -> set[str]:
    """Return the names of saves that are not whole."""
    if isinstance(directory, str):
        return {*Bucket(parse_url("directory", directory)).list(".intents/")}
    # Files of that name are of the start of several processes.
    return {path.name for path in directory.glob(".writing-*") if path.is_dir()}


def whole_steps(directory: Directory) -> list[int]:
    """Return the steps of the checkpoints that are whole."""
    return open_directory(directory).steps()


@contextlib.contextmanager
def opened_store(store: str) -> Iterator[Callable[[str], Directory]]:
    """Yield a function from the name of a run to the directory of its checkpoints."""
    if store == "file":
        with tempfile.TemporaryDirectory() as root:
            yield lambda name: Path(root, name)
    else:
        # The server logs each request.
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        with serving_s3() as server:
            place = {"AWS_ENDPOINT_URL": server.url, **ENVIRONMENT}
            with environment(**place):
                yield lambda name: f"s3://{BUCKET}/{name}"


def what_it_did(attempt: Attempt) -> str:
    """Return the phase that a killed run was in, if it did not save."""
    if attempt.last_phase in ("restore", "end"):
        return attempt.last_phase
    return "start" if attempt.first_step is None else "steps"


def _look_at_start(attempt: Attempt, kept: int, found: Found) -> None:
    """Count what was lost where a run goes on, and hold that it saves when it is due.

    Args:
      attempt: The start.
      kept: The newest step that it must go on from.
      found: Where it is counted.
    """
    if attempt.first_step is None:
        return
    lost = kept - (attempt.first_step - 1)
    if lost > 0:
        found.fail(f"went on from {attempt.first_step - 1}, not from {kept} or later")
        found.lost_steps += lost
    due = -(-attempt.first_step // INTERVAL) * INTERVAL
    # A step is saved once its metrics were shown: some steps later.
    if attempt.last_step >= due + INTERVAL // 2 and due not in attempt.saved:
        found.fail(f"did not begin to save step {due}, the first that was due")


def terminate(
    directory: Directory,
    whole: Attempt,
    found: Found,
    *,
    processes: int,
    rng: np.random.Generator,
) -> None:
    """Send SIGTERM in the midst of the steps; no step may be done twice."""
    told = {"what": "dispatched", "step": int(rng.integers(1, STEPS))}
    moment = Moment(told=told, after_s=0.0, send=signal.SIGTERM)
    attempt = start(directory, processes=processes, moment=moment)
    # After its last step a signal ends a program that has nothing to lose.
    asked = attempt.last_step < STEPS and attempt.exit_codes[0] != 0
    if asked and set(attempt.exit_codes) != {PREEMPTED}:
        found.fail(f"exit codes {attempt.exit_codes} by SIGTERM: {attempt.errors}")
    last = start(directory, processes=processes)
    print(f"  SIGTERM at step {told['step']}: {attempt.last_step} steps", flush=True)
    if asked and last.first_step is not None:
        found.lost_on_sigterm += abs(attempt.last_step + 1 - last.first_step)
    if last.digest != whole.digest and (asked or attempt.digest != whole.digest):
        found.fail(f"final bits {last.digest} after SIGTERM; {last.errors}")


def first_step_seconds(
    directory_of: Callable[[str], Directory],
) -> tuple[float, float]:
    """Return the medians of a start, and of the imports, in seconds; in turn."""
    clock = SystemClock()
    starts, imports = [], []
    for index in range(_STARTS.value):
        begun_s = clock.now_s()
        subprocess.run([sys.executable, "-c", IMPORTS], check=True)
        imports.append(clock.now_s() - begun_s)
        run = directory_of(f"starts{index}")
        starts.append(start(run, processes=1).first_step_s)
    return float(np.median(starts)), float(np.median(imports))


def main(argv: list[str]) -> None:
    del argv
    clock = SystemClock()
    started_s = clock.now_s()
    rng = np.random.default_rng(_SEED.value)
    found = Found()
    with opened_store(_STORE.value) as directory_of:
        whole = {}
        for count in dict.fromkeys(_PROCESSES.value):
            # The first one warms the compilation cache; the second one is timed.
            for turn in ("cold", "warm"):
                whole[count] = start(directory_of(f"{turn}{count}"), processes=count)
        for count, attempt in whole.items():
            if attempt.digest is None:
                sys.exit(f"{count} processes did not end: {attempt.errors}")
        for turn in itertools.count():
            if (left := _KILLS.value - found.kills) <= 0 or found.failures:
                break
            processes = _PROCESSES.value[turn % len(_PROCESSES.value)]
            kills = min(_PER_RUN.value, left)
            print(f"{processes} processes, {kills} kills", flush=True)
            kill_again_and_again(
                directory_of(f"killed{turn}"),
                whole[processes],
                found,
                kills=kills,
                processes=processes,
                rng=rng,
            )
        for turn in range(_TERMS.value):
            processes = _PROCESSES.value[turn % len(_PROCESSES.value)]
            terminate(
                directory_of(f"asked{turn}"),
                whole[processes],
                found,
                processes=processes,
                rng=rng,
            )
        start_s, imports_s = first_step_seconds(directory_of)
    # Its bar is that of a disk: moto answers a request in milliseconds, one at a time.
    is_on_disk = _STORE.value == "file"
    first_step = "first_step_s" if is_on_disk else "first_step_in_bucket_s"
    result = {
        "failures": found.failures,
        "kills": found.kills,
        "aimed_at": {key: found.aimed_at[key] for key in dict.fromkeys(_AIMS)},
        "killed_in": {key: found.killed_in[key] for key in _KEYS},
        "in_saves": found.killed_in["save"],
        "half_written": found.half_written,
        "lost_steps": found.lost_steps,
        "lost_on_sigterm": found.lost_on_sigterm,
        "first_step_s": None,
        first_step: round(start_s - imports_s, 2),
        "imports_s": round(imports_s, 2),
        "processes": _PROCESSES.value,
        "store": _STORE.value,
        "seconds": round(clock.now_s() - started_s, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
