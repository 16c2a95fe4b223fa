import json
import os
import pty
import re
import subprocess
import sys
import threading
import time

import pytest

import replicator.launchpad_bridge as lp
from replicator.cli.look import program as command
from replicator.cli.main import main
from tests.launchpad_bridge.noted import wait_until_noted
from tests.launchpad_bridge.programs import Counter

LONG_S = 120


@pytest.fixture
def running(monkeypatch, tmp_path):
    """A program of this test alone: others of this user may run."""
    monkeypatch.setenv("COLUMNS", "200")
    with lp.launch(made("shown"), launch_type="threads") as run:
        wait_until_noted(run)
        yield run


def made(name):
    program = lp.Program(name)
    counter = program.add_node(lp.CourierNode(Counter), label="counter")
    program.add_node(lp.PyNode(wait_for_stop, counter), label="waiter")
    return program


def wait_for_stop(counter):
    lp.wait_for_stop()


def only(monkeypatch, *runs):
    ids = {run.run_id for run in runs}
    known = command.running_programs
    monkeypatch.setattr(
        command, "running_programs", lambda: [r for r in known() if r.run_id in ids]
    )


def test_the_one_that_runs_is_shown(running, monkeypatch, capsys):
    only(monkeypatch, running)
    assert main(["program"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("shown: running, 2 nodes, ")
    assert re.search(r"counter +running +0 +- +\d", out)
    assert re.search(r"waiter +running +0 +-", out)


@pytest.mark.parametrize("by", ["name", "run", "folder"])
def test_it_is_found_by_name_run_or_folder(running, monkeypatch, capsys, by):
    only(monkeypatch, running)
    words = {"name": "shown", "run": running.run_id[:8], "folder": running.plan.folder}
    assert main(["program", str(words[by]), "--json", "--interval", "0.1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run_id"], told["phase"]) == (running.run_id, "running")
    assert [edge["source"] for edge in told["edges"]] == ["waiter"]


def test_without_any_program_it_says_so(monkeypatch, capsys):
    only(monkeypatch)
    assert main(["program"]) == 1
    assert "No program of this user runs on this host" in capsys.readouterr().err


def test_of_several_one_must_be_named(running, monkeypatch, capsys):
    with lp.launch(made("other"), launch_type="threads") as other:
        only(monkeypatch, running, other)
        assert main(["program"]) == 2
        out, err = capsys.readouterr()
        assert {"shown", "other", running.run_id, other.run_id} <= set(out.split())
        assert "got nothing, and 2 of these run" in err
        assert main(["program", "third"]) == 2
        assert "got 'third', which is none of these" in capsys.readouterr().err
        assert main(["program", "other"]) == 0


def test_one_that_has_ended_is_said_to_have(running, capsys):
    folder = running.plan.folder
    running.stop_and_wait()
    assert main(["program", str(folder)]) == 1
    assert "must belong to a running program" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "nan", "1e9"])
def test_a_strange_interval_is_refused(seconds, capsys):
    assert main(["program", "--interval", seconds]) == 2
    assert "`--interval` must be" in capsys.readouterr().err


class Terminal:
    """`replicator program` on a terminal of 30 lines."""

    def __init__(self, *words):
        ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "replicator.cli", "program", *words],
            stdout=theirs,
            stderr=theirs,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"},
        )
        os.close(theirs)
        self._ours = ours
        self._seen = b""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, pattern):
        until_s = time.monotonic() + LONG_S
        with self._changed:
            while not (found := re.search(pattern, self.text())):
                left_s = until_s - time.monotonic()
                assert left_s > 0, self.text()
                self._changed.wait(left_s)
            return found

    def text(self):
        return re.sub(
            r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._seen.decode(errors="replace")
        )

    def end(self):
        code = self.process.wait(LONG_S)
        self._reader.join(LONG_S)
        os.close(self._ours)
        return code

    def _read(self):
        while True:
            try:
                new = os.read(self._ours, 4096)
            except OSError:  # the other end is closed
                new = b""
            with self._changed:
                self._seen += new
                self._changed.notify_all()
            if not new:
                return


def test_on_a_terminal_it_is_live_until_the_program_ends(running):
    terminal = Terminal(running.run_id, "--interval", "0.2")
    try:
        terminal.wait_for(r"waiter +running")
        terminal.wait_for(r"shown: running[\s\S]+shown: running")
        running.stop_and_wait()
        terminal.wait_for("shown was stopped by the launcher.")
    finally:
        running.stop()
        assert terminal.end() == 0, terminal.text()


def test_ctrl_c_ends_the_looking_alone(running):
    terminal = Terminal(running.run_id)
    try:
        terminal.wait_for(r"waiter +running")
        terminal.process.send_signal(2)
    finally:
        assert terminal.end() == 0, terminal.text()
    assert not running.is_over
    assert "Traceback" not in terminal.text()
