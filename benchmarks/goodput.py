"""Kill a run once a minute, and say which share of the time went into kept steps.

A child process trains the digits ResNet through `run` with `checkpoint_dir`, by default
with a save every 1.5 s: Young's choice (CACM 17(9), 1974), the root of twice what a
save holds the loop (20 ms) times the time between kills (60 s). It is killed by SIGKILL
so long after its start, and started again at once; the last one is asked to end. Useful
are the seconds of steps that were kept, as the run's own journal tells
(`replicator.monitoring.goodput`); they are divided by the time of the machine's clock
from the first `exec` to the end of the last process, imports of the first and the last
seconds of each included. The compilation cache is warm: before all that, another run
of the same program makes ten steps.

Beside it stands `by_pace`, which asks no journal: the steps kept, times the seconds of
a step in a run that saves nothing and that nobody kills, through the same time. So it
counts also by how much saves, notes and fresh processes slow the steps themselves. The
undisturbed run is made anew before the first process and after each.
"""

import dataclasses
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import optax
from absl import app, flags

import replicator
from benchmarks.step.step_pair import replicator_init, replicator_step
from benchmarks.tasks import digits_resnet, mlp
from replicator.base.host.clock import Clock, SystemClock
from replicator.hooks import Hook, StateEvent, every
from replicator.monitoring.events import read_events
from replicator.monitoring.goodput import Goodput, goodput

_KILLS = flags.DEFINE_integer("kills", 4, "SIGKILLs; one more process ends by itself.")
_INTERVAL_S = flags.DEFINE_float("interval_s", 60.0, "Seconds that each process lives.")
_SAVE_S = flags.DEFINE_float("save_s", 1.5, "Seconds from save to save.")
_TASK = flags.DEFINE_enum("task", "digits_resnet", ["digits_resnet", "mlp"], "Model.")
_DEVICES = flags.DEFINE_integer("devices", 2, "Devices of the process.")
_PACE_S = flags.DEFINE_float("pace_s", 10.0, "Seconds that each undisturbed run has.")
_CHILD = flags.DEFINE_string("child", None, "Internal: train in this directory.")
_UNDISTURBED = flags.DEFINE_bool("undisturbed", False, "Internal: print the pace.")
_END_S = 300.0
_LOOK_STEPS = 10


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a run that was killed again and again.

    Attributes:
      wall_s: From each start of a process to its end, all together.
      found: What its journal tells.
      steps: That were kept.
      step_s: Of the undisturbed runs between the processes, the seconds of a step.
      between_s: What those runs took, which the journal calls `down`.
      problems: Of children that ended otherwise than they were told to.
    """

    wall_s: float
    found: Goodput
    steps: int
    step_s: list[float]
    between_s: float
    problems: list[str]

    @property
    def goodput(self) -> float:
        """The share of time in kept steps."""
        return self.found.useful_s / self.wall_s

    @property
    def by_pace(self) -> float:
        """The share of the steps that an undisturbed run would have made."""
        return self.steps * statistics.mean(self.step_s) / self.wall_s

    @property
    def lost_s(self) -> dict[str, float]:
        """By cause, `outside` included: what no process could note."""
        down_s = self.found.lost_s.get("down", 0.0) - self.between_s
        outside_s = self.wall_s + self.between_s - self.found.wall_s
        return self.found.lost_s | {"down": down_s, "outside": outside_s}


class EndIfAsked(Hook):
    """End the run after a step, one of ten, at which a file is there."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_asked = False

    @property
    def should_stop(self) -> bool:
        """Return whether the file was there after a step (at least one)."""
        return self._is_asked

    def on_state(self, event: StateEvent) -> None:
        """Look for the file; not at each step, to look is no part of a run."""
        if event.step % _LOOK_STEPS == 0:
            self._is_asked = self._file.exists()


class Pace(Hook):
    """Take the time of steps, but for the first ones; end after so many seconds.

    Attributes:
      step_s: What a step took so far, in seconds.
    """

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds = seconds
        self._clock = clock
        self._began_s = 0.0
        self._is_over = False
        self.step_s = 0.0

    @property
    def should_stop(self) -> bool:
        """Return whether the seconds are over."""
        return self._is_over

    def on_state(self, event: StateEvent) -> None:
        """Count the steps since the first ten."""
        if event.step == _LOOK_STEPS:
            self._began_s = self._clock.now_s()
        elif event.step > _LOOK_STEPS:
            spent_s = self._clock.now_s() - self._began_s
            self.step_s = spent_s / (event.step - _LOOK_STEPS)
            self._is_over = spent_s > self._seconds


def train(hook: Hook, **options: Any) -> None:
    """Train until the hook ends it, with these options of `run`."""
    replicator.fake_devices(_DEVICES.value)
    rep = replicator.Replicator()
    task = digits_resnet(64) if _TASK.value == "digits_resnet" else mlp(512)
    optimizer = rep.wrap_optimizer(optax.adam(1e-3))
    rep.run(
        replicator_step(task, optimizer),
        [task.batch],
        init_fn=replicator_init(task, optimizer),
        steps=10**9,
        hooks=[hook],
        display=False,
        **options,
    )


def train_in(directory: Path) -> None:
    """Train until asked to end, from wherever the run was saved."""
    train(
        EndIfAsked(directory / "end"),
        directory=directory / "run",
        checkpoint_dir=directory / "checkpoints",
        checkpoint_every=every(seconds=_SAVE_S.value),
    )


def train_undisturbed() -> None:
    """Train without a directory; print the seconds of a step."""
    pace = Pace(_PACE_S.value, SystemClock())
    train(pace)
    print(pace.step_s)


def kill_again_and_again(
    directory: Path, *, kills: int, interval_s: float, clock: Clock
) -> Outcome:
    """Start a run, kill it every so many seconds, let the last process end."""
    warm, killed = directory / "warm", directory / "killed"
    for each in (warm, killed):
        each.mkdir()
    (warm / "end").touch()
    problems = _live(warm, _END_S, 0)
    step_s, wall_s, between_s = [_pace()], 0.0, 0.0
    for code in [-signal.SIGKILL] * kills + [0]:
        started_s = clock.now_s()
        problems += _live(killed, interval_s, code)
        ended_s = clock.now_s()
        step_s.append(_pace())
        wall_s += ended_s - started_s
        if code != 0:
            between_s += clock.now_s() - ended_s
    events = list(read_events(killed / "run"))
    return Outcome(
        wall_s=wall_s,
        found=goodput(events),
        steps=[event["step"] for event in events if event["kind"] == "phases"][-1],
        step_s=step_s,
        between_s=between_s,
        problems=problems,
    )


def _pace() -> float:
    """Return the seconds of a step of an undisturbed run, in a process of its own."""
    command = [*_command(), "--undisturbed", f"--pace_s={_PACE_S.value}"]
    return float(subprocess.check_output(command, text=True, timeout=_END_S))


def _live(directory: Path, seconds: float, expected_code: int) -> list[str]:
    """Start a process; kill it in time, or ask it to end; list what went wrong."""
    command = [*_command(), f"--child={directory}", f"--save_s={_SAVE_S.value}"]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stderr=errors)
        try:
            child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            if expected_code == 0:
                (directory / "end").touch()
            else:
                child.kill()
        try:
            code = child.wait(timeout=_END_S)
        finally:
            child.kill()
        errors.seek(0)
        if code == expected_code:
            return []
        return [f"exit code {code}: {''.join(errors.readlines()[-12:])}"]


def _command() -> list[str]:
    command = [sys.executable, "-m", "benchmarks.goodput"]
    return [*command, f"--devices={_DEVICES.value}", f"--task={_TASK.value}"]


def main(argv: list[str]) -> None:
    del argv
    if _CHILD.value is not None:
        train_in(Path(_CHILD.value))
        return
    if _UNDISTURBED.value:
        train_undisturbed()
        return
    with tempfile.TemporaryDirectory() as name:
        outcome = kill_again_and_again(
            Path(name),
            kills=_KILLS.value,
            interval_s=_INTERVAL_S.value,
            clock=SystemClock(),
        )
    if outcome.problems:
        sys.exit("\n".join(outcome.problems))
    lives = outcome.found.sessions
    print(f"{lives} processes, {outcome.wall_s:.0f} s; of each process's time:")
    print(f"  {'kept steps':12}{outcome.found.useful_s / lives:8.2f} s")
    for cause, lost_s in sorted(outcome.lost_s.items(), key=lambda item: -item[1]):
        print(f"  {cause:12}{lost_s / lives:8.2f} s")
    result = {
        "goodput": round(outcome.goodput, 4),
        "by_pace": round(outcome.by_pace, 4),
        "step_ms": [round(1e3 * step_s, 2) for step_s in outcome.step_s],
        "kills": _KILLS.value,
        "interval_s": _INTERVAL_S.value,
        "wall_s": round(outcome.wall_s, 1),
        "lost_s": {cause: round(s, 2) for cause, s in outcome.lost_s.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
