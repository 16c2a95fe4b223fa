"""A worker behind a command. That it is one like others, `test_conformance` shows."""

import os
import signal
from pathlib import Path

import pytest

import replicator.launchpad_bridge as lp
from tests.launchpad_bridge import programs, scripts
from tests.launchpad_bridge.programs import SOON_S, program_of
from tests.launchpad_bridge.readme import block_with

STAND_IN = Path(__file__).with_name("bin")


class Behind:
    """A launcher that puts workers behind a command; its own `Workers`."""

    name = "behind"

    def __init__(self, *command):
        self._command = command
        self._started = []

    def open(self, plan, report):
        self._plan, self._report = plan, report
        return self

    def start(self, executable, attempt):
        self._started.append(
            lp.PipedWorker(
                self._command,
                executable,
                attempt,
                plan=self._plan,
                launch_type=self.name,
                report=self._report,
            )
        )
        return self._started[-1]

    def close(self):
        for worker in self._started:
            worker.close()


def shout(text):
    print(text)
    os.write(1, b"to the descriptor\n")
    return text


def read_input():
    import sys

    return sys.stdin.read()


@pytest.mark.slow
def test_what_a_node_prints_goes_to_its_log_and_not_into_its_report(tmp_path):
    program = program_of(lp.PyNode(shout, "hello"))
    run = lp.launch(program, Behind("env"), log_dir=tmp_path)
    run.wait(SOON_S)
    assert run.results == {"node": "hello"}
    assert "hello" in (tmp_path / "node.log").read_text()
    assert "to the descriptor" in (tmp_path / "node.log").read_text()


@pytest.mark.slow
def test_what_an_interpreter_prints_as_it_starts_is_no_report(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('of this host', flush=True)")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run = lp.launch(
        program_of(lp.PyNode(shout, "hello")),
        Behind("env", f"PYTHONPATH={path}"),
        log_dir=tmp_path,
    )
    run.wait(SOON_S)
    assert run.results == {"node": "hello"}
    assert "of this host" in (tmp_path / "node.log").read_text()


@pytest.mark.slow
def test_a_node_has_no_input_of_its_launcher(tmp_path):
    program = program_of(lp.PyNode(read_input))
    run = lp.launch(program, Behind("env"), log_dir=tmp_path)
    run.wait(SOON_S)
    assert run.results == {"node": ""}


def test_a_command_that_is_not_there_is_named(tmp_path):
    run = lp.launch(program_of(lp.PyNode(int)), Behind("no-srun"), log_dir=tmp_path)
    with pytest.raises(lp.NodeFailedError, match="got 'no-srun'") as raised:
        run.wait(SOON_S)
    assert raised.value.node == "node"


def test_a_command_that_fails_tells_its_status_and_its_words(tmp_path):
    failing = Behind("sh", "-c", "echo no room >&2; exit 4", "sh")
    run = lp.launch(program_of(lp.PyNode(int)), failing, log_dir=tmp_path)
    with pytest.raises(lp.NodeFailedError, match="exited with code 4") as raised:
        run.wait(SOON_S)
    assert "no room" in str(raised.value)


def test_a_command_that_says_something_else_is_refused(tmp_path):
    talking = Behind("sh", "-c", 'printf "%064d" 7; exec "$@"', "sh")
    program = program_of(lp.PyNode(programs.wait_for_stop))
    run = lp.launch(program, talking, log_dir=tmp_path)
    with pytest.raises(lp.NodeFailedError, match="sent what is no report"):
        run.wait(SOON_S)


LAUNCHING = f"""
{block_with("class Slurm")}
program = program_of(lp.PyNode(tell_process_and_wait, sys.argv[-1]))
lp.launch(program, Slurm()).wait()
"""


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_worker_ends_when_its_launcher_was_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(STAND_IN), prepend=os.pathsep)
    path = tmp_path / "process"
    body = LAUNCHING.replace("sys.argv[-1]", repr(str(path)))
    with scripts.start(body) as launcher:
        try:
            programs.wait_until(lambda: path.exists() and path.read_text())
            worker = int(path.read_text())
            assert is_alive(worker)
        finally:
            os.kill(launcher.pid, signal.SIGKILL)
    programs.wait_until(lambda: not is_alive(worker))
