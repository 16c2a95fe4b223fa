"""Start a run, end it by a signal at a chosen moment, and keep what it told."""

import dataclasses
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from replicator.base.host.clock import SystemClock
from replicator.distributed.processes.ports import free_port

STEPS, INTERVAL = 240, 60
LIMIT_S = 240.0
_DEVICES = 2
# XLA's programs for CPUs are kept for the first of several processes only: the others
# compile at each start, and a large model would make a kill last half a minute.
_TASKS = {1: "digits_resnet", 2: "mlp"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """When a run is sent a signal: a while after it told something, or was started.

    Attributes:
      told: Fields of the line that it waits for; none for the start.
      times: Number of such lines that it waits for.
      after_s: The while.
      send: What is sent.
    """

    told: dict[str, Any]
    after_s: float
    times: int = 1
    send: signal.Signals = signal.SIGKILL

    def is_here(self, line: dict[str, Any]) -> bool:
        """Return whether `line` is the one."""
        return line.items() >= self.told.items()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Result of one start of a run.

    Attributes:
      exit_codes: Of its processes.
      lines: What its first process told.
      started_s: When it was started, by the machine's monotonic clock.
      errors: The last lines of standard error.
    """

    exit_codes: tuple[int, ...]
    lines: tuple[dict[str, Any], ...]
    started_s: float
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
    def saved(self) -> list[int]:
        """The steps that it began to save: one at a time, each after the one before."""
        return [line["step"] for line in self.told("saving")]

    @property
    def last_phase(self) -> str:
        """Its last phase, steps left out."""
        return next((line["phase"] for line in self.told("phase")[::-1]), "start")

    @property
    def first_step_s(self) -> float:
        """From `exec` to the end of its first step."""
        return self.told("step")[0]["time_s"] - self.started_s

    @property
    def restore_s(self) -> float:
        """Seconds to find and read a checkpoint, or to make a first state."""
        times_s = [line["time_s"] for line in self.told("phase")]
        phases = [line["phase"] for line in self.told("phase")]
        began = phases.index("restore")
        return times_s[began + 1] - times_s[began]

    @property
    def is_saving(self) -> bool:
        """Whether it had begun to write a save, and not ended."""
        of_saves = [line for line in self.lines if line["what"] in ("saving", "saved")]
        return bool(of_saves) and of_saves[-1]["what"] == "saving"

    @property
    def save_s(self) -> float:
        """Median of the seconds that a save took."""
        began_s = {line["step"]: line["time_s"] for line in self.told("saving")}
        return statistics.median(
            line["time_s"] - began_s[line["step"]] for line in self.told("saved")
        )

    @property
    def digest(self) -> str | None:
        """Digest of the final state, if the run finished."""
        return next((line["digest"] for line in self.told("bits")), None)


def start(
    directory: Path | str,
    *,
    processes: int,
    moment: Moment | None = None,
    loop: str = "run",
) -> Attempt:
    """Start a run; send it a signal at a moment, unless it ends before.

    Args:
      directory: Of its checkpoints: a folder, or a URL.
      processes: How many it has.
      moment: None to let it end.
      loop: Whose loop it is: `run`'s, or one's own in a `session`.

    Raises:
      subprocess.TimeoutExpired: It neither ended nor came to that moment in time.
    """
    started_s = SystemClock().now_s()
    with ExitStack() as open_files:
        files = [
            open_files.enter_context(tempfile.TemporaryFile("w+"))
            for _ in range(2 * processes - 1)
        ]
        group = _start_group(directory, files, loop)
        told = _Told(group[0])
        try:
            if moment is not None and told.wait(moment):
                # The end of the whole machine; a notice reaches one process first.
                is_kill = moment.send == signal.SIGKILL
                for process in group if is_kill else group[-1:]:
                    process.send_signal(moment.send)
            codes = tuple(process.wait(timeout=LIMIT_S) for process in group)
        finally:
            for process in group:
                process.kill()
                process.wait()
        for file in files:
            file.seek(0)
        errors = "".join("".join(file.readlines()[-12:]) for file in files[::2])
    return Attempt(
        exit_codes=codes, lines=told.close(), started_s=started_s, errors=errors
    )


class _Told:
    """Standard output of a process, line by line."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self._new: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, args=[process.stdout])
        self._reader.start()

    def wait(self, moment: Moment) -> bool:
        """Return at a moment, or False when it ended before."""
        left = moment.times if moment.told else 0
        try:
            while left:
                line = self._new.get(timeout=LIMIT_S)
                if line is None:
                    return False
                left -= moment.is_here(line)
            self._process.wait(timeout=moment.after_s)
        except queue.Empty:
            raise subprocess.TimeoutExpired(self._process.args, LIMIT_S) from None
        except subprocess.TimeoutExpired:
            return True
        return False

    def close(self) -> tuple[dict[str, Any], ...]:
        """Return all that was told, when the process has ended."""
        self._reader.join()
        return tuple(self._lines)

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for text in stream:
                # Others write there, too, and a kill may tear the last line.
                if text.startswith('{"what"') and text.endswith("}\n"):
                    self._lines.append(json.loads(text))
                    self._new.put(self._lines[-1])
        self._new.put(None)


def _start_group(
    directory: Path | str, files: Sequence[IO[str]], loop: str
) -> list[subprocess.Popen]:
    """Start all processes: the first one's output is a pipe, all else goes to files."""
    processes = (len(files) + 1) // 2
    command = [
        sys.executable,
        "-m",
        "benchmarks.runs.killed_run",
        f"--directory={directory}",
    ]
    command += [f"--task={_TASKS[processes]}", f"--devices={_DEVICES // processes}"]
    command += [f"--steps={STEPS}", f"--interval={INTERVAL}", f"--loop={loop}"]
    coordinator = f"127.0.0.1:{free_port()}"
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
                stdout=files[2 * index - 1] if index else subprocess.PIPE,
                stderr=files[2 * index],
                text=True,
                env=os.environ | (place if processes > 1 else {}),
            )
        )
    return group
