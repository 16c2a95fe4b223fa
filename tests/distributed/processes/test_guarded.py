"""What is left of a command, and of its launcher's folder, when either ends."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from replicator.distributed.processes.guard import KILLED_BY_LAUNCHER, delete
from replicator.distributed.processes.guarded import GuardedProcess
from replicator.launchpad_bridge.run_folder import what_stays
from tests.multiprocess.worker_processes import wait_dead


def guarded(folder, command, **options):
    """Start a shell's command under a guard, with its output in a pipe."""
    return GuardedProcess(
        ["sh", "-c", command],
        owner=folder.name,
        environ=os.environ,
        folder=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        **options,
    )


# A child that has left the session, and ignores what can be ignored.
HAS_CHILD = "setsid sh -c 'trap \"\" TERM HUP INT; echo $$; exec sleep 600' & wait"


def test_a_command_that_ends_tells_its_code(tmp_path):
    process = guarded(tmp_path, "exit 7")
    assert process.stdout.read() == b""
    assert process.close() == 7


def test_whoever_is_ended_takes_along_what_left_its_session(tmp_path):
    process = guarded(tmp_path, HAS_CHILD)
    child = int(process.stdout.readline())
    assert process.close() == KILLED_BY_LAUNCHER
    wait_dead([child])


def test_a_killed_guard_leaves_nothing_that_bears_its_mark(tmp_path):
    process = guarded(tmp_path, HAS_CHILD)
    child = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    assert process.close() == -signal.SIGKILL
    wait_dead([child])


def test_a_killed_guard_takes_nothing_along_that_another_guards(tmp_path):
    one, other = guarded(tmp_path, HAS_CHILD), guarded(tmp_path, "read line; exit 5")
    one.stdout.readline()
    os.kill(one.pid, signal.SIGKILL)
    one.close()
    # Its input is empty, so it goes on to its end unless it was killed.
    assert other.stdout.read() == b""
    assert other.close() == 5


TWO_SIGNALS = """
import os, sys
from pathlib import Path
from tests.distributed.processes.test_guarded import *

folder = Path(sys.argv[1])
process = guarded(folder, HAS_CHILD)
child = int(process.stdout.readline())
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
    os.kill(process.pid, number)
process.close()
wait_dead([child])
"""


def test_several_signals_at_once_leave_nothing_behind(tmp_path):
    command = [sys.executable, "-c", TWO_SIGNALS, tmp_path]
    subprocess.run(command, check=True, timeout=300)


@pytest.mark.parametrize("logs", ["run/logs", "elsewhere"])
def test_of_a_run_stay_its_logs_with_the_lock_by_which_they_are_swept(tmp_path, logs):
    run, logs = tmp_path / "run", tmp_path / logs
    for folder in (run, logs, run / "tls"):
        folder.mkdir(parents=True, exist_ok=True)
    for path in (run / "launcher.lock", run / "secret", run / "tls/key", logs / "a"):
        path.touch()
    delete(run, keep=what_stays(run, logs))
    left = sorted(os.listdir(run)) if run.exists() else None
    assert left == (["launcher.lock", "logs"] if logs.parent == run else None)
    assert (logs / "a").exists()


def test_it_may_be_closed_by_several_threads_at_once(tmp_path):
    process = guarded(tmp_path, "exec sleep 600")
    together = threading.Barrier(8)

    def close(_):
        together.wait()
        return process.close()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(close, range(8))) == {KILLED_BY_LAUNCHER}
