"""Kill one process of a group, and time the way to its next step: from memory.

`replicator launch` runs four processes whose state of 100 MB is copied to the launcher
every five steps, and saved to the disk never. One process after the other is killed by
SIGKILL, at different distances behind a copy. `seconds` is the longest time from a kill
to the end of the first new step: the others are ended, all are started again, import,
meet, read the copies of all, and compile. `host_seconds` is that of a launcher that is
killed with its process, one of two, and started again at once: its copies are in the
other one. `lost_steps` is the largest number of steps that were done again.
Launchers keep processes ready (`--ready`).
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from absl import app, flags

from replicator.distributed.processes.ports import free_port
from replicator.rpc.security.secret import FILE_VARIABLE, Secret

_KILLS = flags.DEFINE_integer("kills", 4, "Processes that are killed, in turn.")
_PROCESSES = flags.DEFINE_integer("processes", 4, "Processes of the group.")
_MEGABYTES = flags.DEFINE_integer("megabytes", 100, "Size of the state.")
_EVERY = flags.DEFINE_integer("every", 5, "Steps from copy to copy.")
_SETTLED_S = flags.DEFINE_float("settled_s", 20.0, "Seconds before each kill.")
_LIMIT_S = 120.0  # for a start, or a restart, on a busy machine


class Group:
    """A launcher whose processes print what happens to them.

    Args:
      command: Command line of the launcher.
      environ: Variables beside those of this process.

    Attributes:
      pids: Process ids of the newest attempt, by rank.
    """

    def __init__(self, command: list[str], environ: Mapping[str, str]) -> None:
        self.launcher = subprocess.Popen(
            command,
            env={"JAX_PLATFORMS": "cpu", **os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.pids: dict[int, int] = {}
        self._steps: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
        self._last_lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def next_step(self) -> tuple[int, float]:
        """Wait for a step; return its number, and the time when it was done.

        Raises:
          RuntimeError: The launcher ended, or nothing came in time.
        """
        try:
            step = self._steps.get(timeout=_LIMIT_S)
        except queue.Empty:
            step = None
        if step is None:
            raise RuntimeError("no step came:\n" + "".join(self._last_lines[-60:]))
        return step

    def close(self) -> None:
        """End the launcher, and all that is below it."""
        self.launcher.kill()
        self.launcher.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.launcher.stdout is not None
        with self.launcher.stdout as lines:
            for line in lines:
                match line.split()[1:]:
                    case ["here", rank, _, pid]:
                        self.pids[int(rank)] = int(pid)
                    case ["step", number, time_s] if line.startswith("[0]"):
                        self._steps.put((int(number), float(time_s)))
                    case _:
                        self._last_lines.append(line)
        self._steps.put(None)


@contextlib.contextmanager
def running(folder: Path, *options: str, **environ: str) -> Iterator[Group]:
    """Run a launcher until the end of the block.

    Args:
      folder: Folder of all launchers.
      *options: Its options.
      **environ: Its variables.
    """
    command = [sys.executable, "-m", "replicator.cli", "launch", *options]
    command += ["--devices-per-process=1", "--ready"]
    command += ["-m", "benchmarks.runs.copied_run", f"--directory={folder}/saved"]
    command += [f"--megabytes={_MEGABYTES.value}", f"--every={_EVERY.value}"]
    group = Group(command, environ)
    try:
        yield group
    finally:
        group.close()


def wait_settled(group: Group, *, behind: int) -> int:
    """Wait for a moment to kill; return the last step that was done.

    Then the launcher has processes ready, and the copies have memory.

    Args:
      group: The group.
      behind: Steps behind a copy.
    """
    step, began_s = group.next_step()
    done_s = began_s
    while done_s < began_s + _SETTLED_S.value or step % _EVERY.value != behind:
        step, done_s = group.next_step()
    return step


def next_attempt(group: Group, step: int, killed_s: float) -> tuple[float, int]:
    """Wait for the first step of the next attempt; return its delay, and steps lost.

    Args:
      group: The group.
      step: Last step before the kill, as far as is known.
      killed_s: Time of the kill.
    """
    last = step
    while True:
        step, done_s = group.next_step()
        if step <= last:
            return done_s - killed_s, last - step + 1
        last = step


def kill_process(group: Group, rank: int, *, behind: int) -> tuple[float, int]:
    """Kill a process, so many steps behind a copy; as `next_attempt`."""
    step = wait_settled(group, behind=behind)
    os.kill(group.pids[rank], signal.SIGKILL)
    return next_attempt(group, step, time.monotonic())


def kill_host(folder: Path) -> tuple[float, int]:
    """Kill a launcher with its process, start it again at once; as `next_attempt`."""
    folder.mkdir(mode=0o700)
    Secret.generate().write(folder / "secret")
    environ = {
        FILE_VARIABLE: str(folder / "secret"),
        "REPLICATOR_COORDINATOR": f"127.0.0.1:{free_port()}",
        "REPLICATOR_NUM_PROCESSES": "2",
    }
    options = ("--processes=1", "--copies-host=127.0.0.1")

    def host(number: int) -> contextlib.AbstractContextManager[Group]:
        own = {**environ, "REPLICATOR_PROCESS_ID": str(number)}
        return running(folder, *options, **own)

    with contextlib.ExitStack() as stack:
        stays, lost = (stack.enter_context(host(number)) for number in (0, 1))
        step = wait_settled(stays, behind=2 % _EVERY.value)
        lost.launcher.kill()
        killed_s = time.monotonic()
        stack.enter_context(host(1))
        return next_attempt(stays, step, killed_s)


def main(argv: list[str]) -> None:
    del argv
    began_s = time.monotonic()
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(folder / "four", f"--processes={_PROCESSES.value}") as group:
            for number in range(_KILLS.value):
                rank = (number + 1) % _PROCESSES.value
                behind = (number + 2) % _EVERY.value
                seconds, lost = kill_process(group, rank, behind=behind)
                print(f"rank {rank} killed: a step after {seconds:.2f} s, {lost} lost")
                found.append((seconds, lost))
        host_seconds, lost = kill_host(folder / "hosts")
        print(f"host killed: a step after {host_seconds:.2f} s, {lost} lost")
    result = {
        "kills": len(found),
        "seconds": round(max(seconds for seconds, _ in found), 2),
        "host_seconds": round(host_seconds, 2),
        "lost_steps": max(lost, *(each for _, each in found)),
        "total": round(time.monotonic() - began_s, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
