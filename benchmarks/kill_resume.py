"""Kill runs at random moments, start them again, and look at what was lost: nothing.

A run trains the digits ResNet with a checkpoint every few steps. All its processes are
killed by SIGKILL (start-up, restore and save included), again and again; then it may
end: its final bits must be those of a run that nobody killed. After each kill no more
steps are done again than one interval, and those of the save that was in flight. By
SIGTERM nothing may be lost.

`first_step_s` is the time from `exec` to the end of the first new step, with a warm
compilation cache, less what the imports of jax, flax and orbax take by themselves.
"""

import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from replicator.clock import SystemClock
from replicator.exit_codes import PREEMPTED

_KILLS = flags.DEFINE_integer("kills", 20, "SIGKILLs in all.")
_PER_RUN = flags.DEFINE_integer("kills_per_run", 5, "SIGKILLs of one run.")
_PROCESSES = flags.DEFINE_multi_integer("processes", [1, 2], "Processes, in turn.")
_TERMS = flags.DEFINE_integer("terms", 4, "SIGTERMs in all, of one process each.")
_STARTS = flags.DEFINE_integer("starts", 5, "Starts that are timed.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the moments.")
STEPS, INTERVAL, DEVICES = 240, 60, 2
LIMIT_S = 240.0
IMPORTS = "import jax, flax.nnx, orbax.checkpoint"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What one start of a run came to.

    Attributes:
      exit_codes: Of its processes.
      lines: What its first process told.
      started_s: When it was started, by the machine's monotonic clock.
      seconds: How long it lived.
      errors: The last lines of standard error.
    """

    exit_codes: tuple[int, ...]
    lines: tuple[dict[str, Any], ...]
    started_s: float
    seconds: float
    errors: str

    def told(self, what: str) -> list[dict[str, Any]]:
        """Return its lines of one kind."""
        return [line for line in self.lines if line["what"] == what]

    @property
    def first_step(self) -> int | None:
        """The first step that it made, if it came so far."""
        return next((line["step"] for line in self.told("dispatched")), None)

    @property
    def last_step(self) -> int:
        """The last step that it made; 0 if none."""
        return max((line["step"] for line in self.told("dispatched")), default=0)

    @property
    def digest(self) -> str | None:
        """Of the final state, if it came to its end."""
        return next((line["digest"] for line in self.told("bits")), None)


@dataclasses.dataclass(kw_only=True)
class Found:
    """What all kills together did."""

    kills: int = 0
    failures: int = 0
    lost_steps: int = 0
    lost_on_sigterm: int = 0

    def fail(self, problem: str) -> None:
        """Count a failure, and say what it was."""
        print(f"  FAILED: {problem}", flush=True)
        self.failures += 1


def start(
    directory: Path,
    *,
    processes: int,
    send: signal.Signals | None = None,
    after_s: float = LIMIT_S,
) -> Attempt:
    """Start a run; unless it ends before, send it a signal after a while."""
    clock = SystemClock()
    started_s = clock.now_s()
    with ExitStack() as open_files:
        files = [
            open_files.enter_context(tempfile.TemporaryFile("w+"))
            for _ in range(2 * processes)
        ]
        group = _start_group(directory, files)
        try:
            _send_after(group, send, after_s)
            codes = tuple(process.wait(timeout=LIMIT_S) for process in group)
        finally:
            for process in group:
                process.kill()
                process.wait()
        seconds = clock.now_s() - started_s
        for file in files:
            file.seek(0)
        # A kill may tear the last line.
        lines = [line for line in files[0] if line.endswith("}\n")]
        errors = "".join("".join(file.readlines()[-12:]) for file in files[1::2])
    return Attempt(
        exit_codes=codes,
        lines=tuple(map(json.loads, lines)),
        started_s=started_s,
        seconds=seconds,
        errors=errors,
    )


def _start_group(directory: Path, files: list) -> list[subprocess.Popen]:
    processes = len(files) // 2
    command = [sys.executable, "-m", "benchmarks.killed_run"]
    command += [f"--directory={directory}", f"--devices={DEVICES // processes}"]
    command += [f"--steps={STEPS}", f"--interval={INTERVAL}"]
    coordinator = f"127.0.0.1:{_free_port()}"
    group = []
    for index in range(processes):
        place = {
            "REPLICATOR_COORDINATOR": coordinator,
            "REPLICATOR_NUM_PROCESSES": str(processes),
            "REPLICATOR_PROCESS_ID": str(index),
        }
        group.append(
            subprocess.Popen(
                command,
                stdout=files[2 * index],
                stderr=files[2 * index + 1],
                env=os.environ | (place if processes > 1 else {}),
            )
        )
    return group


def _send_after(
    group: list[subprocess.Popen], send: signal.Signals | None, after_s: float
) -> None:
    try:
        group[0].wait(timeout=after_s)
    except subprocess.TimeoutExpired:
        # The end of the whole machine; a notice reaches one process first.
        told = group if send == signal.SIGKILL else group[-1:]
        for process in told:
            process.send_signal(send or signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def kill_again_and_again(
    directory: Path,
    whole: Attempt,
    found: Found,
    *,
    kills: int,
    processes: int,
    rng: np.random.Generator,
) -> None:
    """Kill one run so many times, let it end, and compare its bits."""
    before = 0
    first_s = whole.told("step")[0]["time_s"] - whole.started_s
    # So that it does not come to its end before the last kill.
    latest_s = first_s + (whole.seconds - first_s) / kills
    for _ in range(kills):
        after_s = float(rng.uniform(0, latest_s))
        attempt = start(
            directory, processes=processes, send=signal.SIGKILL, after_s=after_s
        )
        _look_at_start(attempt, before, found)
        killed = attempt.exit_codes[0] == -signal.SIGKILL
        found.kills += killed
        if not killed and attempt.exit_codes[0] != 0:
            found.fail(f"it ended by itself: {attempt.errors}")
        steps = f"steps {attempt.first_step} to {attempt.last_step}"
        print(f"  killed after {after_s:4.1f} s: {steps}", flush=True)
        before = max(before, attempt.last_step)
    last = start(directory, processes=processes)
    _look_at_start(last, before, found)
    if last.digest != whole.digest:
        found.fail(f"final bits {last.digest}, not {whole.digest}; {last.errors}")


def _look_at_start(attempt: Attempt, before: int, found: Found) -> None:
    """Count what was lost, where a run goes on from step `before`."""
    if attempt.first_step is None:
        return
    # The save at the last multiple may have been in flight, not the one before it.
    kept = max(0, (before // INTERVAL - 1) * INTERVAL)
    lost = kept - (attempt.first_step - 1)
    if lost > 0:
        found.fail(f"went on from {attempt.first_step - 1}, not from {kept} or later")
        found.lost_steps += lost


def terminate(
    directory: Path,
    whole: Attempt,
    found: Found,
    *,
    processes: int,
    rng: np.random.Generator,
) -> None:
    """Send SIGTERM in the midst of the steps; no step may be done twice."""
    first = whole.told("step")[0]["time_s"] - whole.started_s
    after_s = float(rng.uniform(first, whole.seconds))
    attempt = start(
        directory, processes=processes, send=signal.SIGTERM, after_s=after_s
    )
    # Before its first step and after its last one a signal ends a program that has
    # nothing to lose.
    asked = 0 < attempt.last_step < STEPS and attempt.exit_codes[0] != 0
    if asked and set(attempt.exit_codes) != {PREEMPTED}:
        found.fail(f"exit codes {attempt.exit_codes} by SIGTERM: {attempt.errors}")
    last = start(directory, processes=processes)
    print(f"  SIGTERM after {after_s:4.1f} s: step {attempt.last_step}", flush=True)
    if asked and last.first_step is not None:
        found.lost_on_sigterm += abs(attempt.last_step + 1 - last.first_step)
    if last.digest != whole.digest and (asked or attempt.digest != whole.digest):
        found.fail(f"final bits {last.digest} after SIGTERM; {last.errors}")


def first_step_seconds(directory: Path) -> tuple[float, float]:
    """Return the medians of a start, and of the imports, in seconds; in turn."""
    clock = SystemClock()
    starts, imports = [], []
    for index in range(_STARTS.value):
        begun_s = clock.now_s()
        subprocess.run([sys.executable, "-c", IMPORTS], check=True)
        imports.append(clock.now_s() - begun_s)
        run = directory / str(index)
        attempt = start(run, processes=1, send=signal.SIGKILL, after_s=1e3)
        done_s = attempt.told("step")[0]["time_s"]
        starts.append(done_s - attempt.started_s)
    return float(np.median(starts)), float(np.median(imports))


def main(argv: list[str]) -> None:
    del argv
    rng = np.random.default_rng(_SEED.value)
    found = Found()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        whole = {}
        for count in dict.fromkeys(_PROCESSES.value):
            # The first one warms the compilation cache; the second one is timed.
            for turn in ("cold", "warm"):
                whole[count] = start(root / f"{turn}{count}", processes=count)
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
                root / f"killed{turn}",
                whole[processes],
                found,
                kills=kills,
                processes=processes,
                rng=rng,
            )
        for turn in range(_TERMS.value):
            processes = _PROCESSES.value[turn % len(_PROCESSES.value)]
            terminate(
                root / f"asked{turn}",
                whole[processes],
                found,
                processes=processes,
                rng=rng,
            )
        start_s, imports_s = first_step_seconds(root / "starts")
    result = {
        "failures": found.failures,
        "kills": found.kills,
        "lost_steps": found.lost_steps,
        "lost_on_sigterm": found.lost_on_sigterm,
        "first_step_s": round(start_s - imports_s, 2),
        "imports_s": round(imports_s, 2),
        "processes": _PROCESSES.value,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
