"""Nothing outlives a program, whoever is killed: launcher, guard, fork server."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replicator.errors import LaunchError
from tests.multiprocess import worker_nodes as nodes
from tests.multiprocess.processes import ROOT
from tests.multiprocess.worker_processes import (
    of_run,
    opened,
    wait_dead,
    wait_file,
    wait_gone,
    wait_until,
)

pytestmark = pytest.mark.slow


def start_doomed(folder, *, start="forkserver"):
    command = [sys.executable, "-m", "tests.multiprocess.doomed_launcher"]
    return subprocess.Popen([*command, str(folder), "3", start], cwd=ROOT)


def kill(launcher):
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_a_killed_launcher_leaves_nothing(tmp_path, start):
    launcher = start_doomed(tmp_path, start=start)
    pids = [
        int(pid)
        for number in range(3)
        for pid in wait_file(tmp_path / f"pids-{number}").split()
    ]
    kill(launcher)
    assert wait_gone((tmp_path / "run_id").read_text()) == []
    wait_dead(pids)
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "logs").exists()


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1, 0.3, 0.6, 0.9])
def test_a_launcher_killed_while_it_starts_leaves_nothing(tmp_path, delay_s):
    launcher = start_doomed(tmp_path)
    run_id = wait_file(tmp_path / "run_id")
    time.sleep(delay_s)  # whatever is happening then
    kill(launcher)
    assert wait_gone(run_id) == []


def family(run_id):
    """Return the guard and the fork server of a run with one worker that sleeps."""
    commands = wait_until(lambda: of_run(run_id))
    (guard,) = (pid for pid, _ in commands if parent(pid) == os.getpid())
    (server,) = (pid for pid, _ in commands if parent(pid) == guard)
    return guard, server


def parent(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
@pytest.mark.parametrize("who", ["guard", "server"])
def test_a_run_that_loses_its_fork_server_hears_of_it_and_leaves_nothing(
    tmp_path, who, number
):
    function = nodes.have_children(tmp_path / "pids", then=nodes.sleep())
    with opened(tmp_path, a=function) as run:
        run.start("a")
        pids = [int(pid) for pid in run.told(tmp_path / "pids").split()]
        guard, server = family(run.run_id)
        os.kill({"guard": guard, "server": server}[who], number)
        end = run.end("a")
        assert end.outcome == "died"
        assert "its fork server has ended" in str(end.error)
        with pytest.raises(LaunchError, match="its fork server has ended"):
            run.start("a", attempt=1)
    wait_dead(pids)


def test_a_worker_that_prints_much_waits_for_nobody_to_read_it(tmp_path):
    with opened(tmp_path, a=nodes.print_much(tmp_path / "done")) as run:
        run.start("a")
        assert run.told(tmp_path / "done")
        assert run.end("a").outcome == "returned"
