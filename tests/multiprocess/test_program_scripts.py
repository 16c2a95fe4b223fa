"""Scripts that launch programs, as users start them: from a terminal.

Rows 24 and 26 of the fault matrix. Ray is one of the script's own, as a user has it who
has no cluster: it has to end with the script, in the same time.
"""

import contextlib
import dataclasses
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from tests.multiprocess.processes import ROOT
from tests.multiprocess.worker_processes import is_alive, wait_file, wait_until

pytestmark = pytest.mark.slow

SCRIPT = "tests.multiprocess.program_script"
TIMEOUT_S = 180.0
LAUNCHERS = ["processes", "ray"]
END_S = 60.0  # their grace to stop is 100 s


@dataclasses.dataclass
class Script:
    """A script that runs, its terminal, and the folder that its nodes write to."""

    process: subprocess.Popen
    terminal: int
    folder: object
    output: bytes = b""

    def press_ctrl_c(self):
        os.write(self.terminal, b"\x03")

    def hang_up(self):
        os.close(self.terminal)
        self.terminal = -1

    def wait_ready(self):
        """Wait for nodes `a` and `b`; return their process ids."""
        return [int(wait_file(self.folder / name)) for name in ("a", "b")]

    def end(self, within_s=TIMEOUT_S):
        """Return the exit code as a shell tells it; read what is printed meanwhile."""
        until_s = time.monotonic() + within_s
        while self.process.poll() is None:
            assert time.monotonic() < until_s, self.text
            self._read()
            time.sleep(0.01)
        self._read()
        code = self.process.returncode
        assert code != -signal.SIGKILL, "it killed itself"
        return 128 - code if code < 0 else code

    @property
    def text(self):
        return self.output.decode().replace("\r\n", "\n")

    def _read(self):
        if self.terminal >= 0:
            with contextlib.suppress(OSError):
                while data := os.read(self.terminal, 1 << 16):
                    self.output += data


@pytest.fixture
def start(tmp_path):
    """Start a kind of script in a terminal of its own."""
    scripts = []

    def start(kind, launcher="processes"):
        if launcher == "ray":
            pytest.importorskip("ray")
        ours, theirs = pty.openpty()
        # Not by `preexec_fn`: JAX warns of a fork once it has started here.
        command = ["setsid", "--ctty", sys.executable, "-m", SCRIPT]
        process = subprocess.Popen(
            [*command, kind, str(tmp_path), launcher],
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        os.set_blocking(ours, False)
        scripts.append(Script(process=process, terminal=ours, folder=tmp_path))
        return scripts[-1]

    yield start
    for script in scripts:
        if script.process.poll() is None:
            script.process.kill()
        script.process.wait()
        if script.terminal >= 0:
            os.close(script.terminal)


def assert_gone(pids):
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_ctrl_c_stops_a_program_gracefully(start, launcher):
    script = start("heeds", launcher)
    pids = script.wait_ready()
    script.press_ctrl_c()
    assert script.end(within_s=END_S) == 130, script.text
    assert_gone(pids)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ctrl_c_end_a_program_that_heeds_nothing(start, launcher):
    script = start("deaf", launcher)
    pids = script.wait_ready()
    script.press_ctrl_c()
    wait_until(lambda: script._read() or "once more kills" in script.text)
    script.press_ctrl_c()
    assert script.end(within_s=END_S) == 130, script.text
    assert_gone(pids)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_storm_of_ctrl_c_ends_it_and_nothing_is_left(start, launcher):
    script = start("deaf", launcher)
    pids = script.wait_ready()
    for _ in range(20):
        script.press_ctrl_c()
        time.sleep(0.01)
    assert script.end(within_s=END_S) == 130, script.text
    assert_gone(pids)


def test_ctrl_c_while_the_workers_are_not_yet_there(start):
    script = start("heeds")
    wait_until(lambda: children(script.process.pid))
    pids = descendants(script.process.pid)
    script.press_ctrl_c()
    assert script.end(within_s=END_S) == 130, script.text
    assert_gone(pids)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_stops_a_program_gracefully(start, launcher, number, code):
    script = start("heeds", launcher)
    pids = script.wait_ready()
    script.process.send_signal(number)
    assert script.end(within_s=END_S) == code, script.text
    assert_gone(pids)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_closed_terminal_stops_a_program(start, launcher):
    script = start("heeds", launcher)
    pids = script.wait_ready()
    script.hang_up()
    assert script.end(within_s=END_S) == 129
    assert_gone(pids)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_stop_from_a_handler_ends_a_script_well(start, launcher):
    assert start("asks", launcher).end() == 0


def test_classes_of_the_script_travel_there_and_back(start):
    script = start("calls")
    assert script.end() == 0, script.text
    assert "result Point(x=2, y=1) True" in script.text


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_dead_node_fails_the_script_by_name_although_nobody_waits(start, launcher):
    script = start("dies", launcher)
    pids = script.wait_ready()
    assert script.end() == 1
    assert "`doomed` was killed by SIGKILL" in script.text
    assert "    last words" in script.text
    assert_gone(pids)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_crash_loop_ends_after_three_restarts_with_its_first_failure(
    start, launcher, tmp_path
):
    script = start("loops", launcher)
    started_s = time.monotonic()
    assert script.end() == 1
    assert (tmp_path / "tries").read_text() == "xxxx"
    assert time.monotonic() - started_s > 0.1 + 0.2 + 0.4
    assert "restart 3 of 3 without progress" in script.text
    assert "gave up after 3 restart(s) without progress" in script.text
    last = script.text.rpartition("NodeFailedError:")[2]
    assert "`looping` raised RuntimeError: bug 1 at step 17" in last


def children(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        mine = [int(child) for child in file.read().split()]
        return mine or threads_children(pid)
    return []


def threads_children(pid):
    """Children belong to the thread that started them."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            found += [int(child) for child in file.read().split()]
    return found


def descendants(pid):
    mine = children(pid)
    return mine + [each for child in mine for each in descendants(child)]
