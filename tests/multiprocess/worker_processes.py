"""Open the processes launcher by itself, hear what it reports, and look for orphans."""

import contextlib
import os
import queue
import time
from pathlib import Path

from replicator.launchpad_bridge.launchers.processes import Processes
from replicator.launchpad_bridge.protocols import (
    Executable,
    Exited,
    Plan,
    Resources,
    StopAsked,
)

TIMEOUT_S = 180.0
_POLL_S = 0.01


class Opened:
    """Workers that run given functions, and what is reported of them."""

    def __init__(self, folder, launcher, functions, resources=None):
        resources = resources or {}
        executables = [
            Executable(
                label=name.partition("/")[0],
                index=0,
                name=name,
                run=function,
                resources=resources.get(name, Resources()),
            )
            for name, function in functions.items()
        ]
        self.run_id = os.urandom(8).hex()
        self.plan = Plan(
            program="tested",
            run_id=self.run_id,
            folder=private(folder / "run"),
            logs=folder / "logs",
            executables=executables,
        )
        self.executables = {each.name: each for each in executables}
        self.heard = queue.Queue()
        self.ends = {}
        self.asked = []
        self.workers = launcher.open(self.plan, self.heard.put)

    def start(self, name, attempt=0):
        return self.workers.start(self.executables[name], attempt)

    def start_all(self):
        return {name: self.start(name) for name in self.executables}

    def end(self, name, attempt=0):
        """Wait until a worker has ended; return how."""
        until_s = time.monotonic() + TIMEOUT_S
        while (name, attempt) not in self.ends:
            self._hear(until_s)
        return self.ends[name, attempt]

    def wait_asked(self):
        until_s = time.monotonic() + TIMEOUT_S
        while not self.asked:
            self._hear(until_s)
        return self.asked[0]

    def told(self, path):
        """Return what a worker has written to a file; fail if one ends before that."""
        until_s = time.monotonic() + TIMEOUT_S
        while not (path.exists() and path.read_text()):
            assert not self.ends, [str(end.error) for end in self.ends.values()]
            assert time.monotonic() < until_s, of_run(self.run_id)
            with contextlib.suppress(queue.Empty):
                self._hear(time.monotonic() + _POLL_S)
        return path.read_text()

    def log(self, name):
        return (self.plan.logs / f"{name.replace('/', '-')}.log").read_text()

    def _hear(self, until_s):
        event = self.heard.get(timeout=max(0.0, until_s - time.monotonic()))
        if isinstance(event, StopAsked):
            self.asked.append(event.by)
        else:
            assert isinstance(event, Exited)
            assert (event.name, event.attempt) not in self.ends, "reported twice"
            self.ends[event.name, event.attempt] = event


@contextlib.contextmanager
def opened(folder, resources=None, *, launcher=None, **functions):
    """Open, and close at the end; then nothing may be left."""
    launcher = launcher or Processes(preload=(), terminal="output_to_files")
    run = Opened(Path(folder), launcher, functions, resources)
    try:
        yield run
    finally:
        run.workers.close()
        left = wait_gone(run.run_id)
    assert not left, f"left behind: {left}"


def private(folder):
    folder.mkdir(mode=0o700)
    return folder


def of_run(run_id):
    """List the processes of a run, its fork servers included: id and command."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if _belongs(entry, run_id.encode()):
                    found.append((int(entry.name), _command(entry)))
    return found


def wait_gone(run_id, within_s=TIMEOUT_S):
    """Return who of a run is still there after a while; nobody, it is hoped."""
    until_s = time.monotonic() + within_s
    while (left := of_run(run_id)) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    return left


def wait_until(condition, within_s=TIMEOUT_S):
    """Poll other processes' state; return what the condition returned."""
    until_s = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < until_s, "it did not come about in time"
        time.sleep(_POLL_S)
    return value


def wait_file(path):
    """Return what a worker has written to a file, once it is there."""
    path = Path(path)
    return wait_until(lambda: path.exists() and path.read_text())


def wait_dead(pids, within_s=TIMEOUT_S):
    """Wait until processes are gone: one that was killed takes a moment to exit."""
    wait_until(lambda: not any(map(is_alive, pids)), within_s)


def is_alive(pid):
    """Return whether a process runs: a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _belongs(entry, run_id):
    if not is_alive(int(entry.name)):
        return False
    environment = (entry / "environ").read_bytes()
    return run_id in environment or run_id in (entry / "cmdline").read_bytes()


def _command(entry):
    return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
