"""Fault 26: Ctrl-C in anger at a real terminal; a terminal that goes away."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from replicator.checkpoint import CheckpointStore
from replicator.exit_codes import INTERRUPTED, PREEMPTED
from tests.multiprocess.groups import at_most

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
CTRL_C = b"\x03"
PATIENCE_S = 60
"""From the first signal to the exit: two seconds, where the machine is idle."""


class Terminal:
    """A program at a terminal of its own, whose keys a test presses."""

    def __init__(self, *arguments):
        self._keyboard, terminal = pty.openpty()
        # `--ctty` makes the terminal the program's own, so that keys are signals.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-m", *map(str, arguments)],
            cwd=ROOT,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        self._text, self._ended, self._changed = "", False, threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def text(self):
        with self._changed:
            return self._text

    def wait_for(self, text, timeout_s=120):
        with self._changed:
            self._changed.wait_for(lambda: text in self._text or self._ended, timeout_s)
            assert text in self._text, self._text[-3000:]

    def press(self, keys):
        os.write(self._keyboard, keys)

    def ends_within(self, seconds):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def wait(self, timeout_s=120):
        if not self.ends_within(timeout_s):
            self.process.send_signal(signal.SIGUSR1)  # it tells its stacks
            self.wait_for("File ", timeout_s=60)
            raise AssertionError(f"it did not end in {timeout_s} s:\n{self.text}")
        self._reader.join(timeout_s)
        return self.process.returncode

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        os.close(self._keyboard)

    def _read(self):
        while True:
            try:
                data = os.read(self._keyboard, 4096)
            except OSError:  # the program has closed its end
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                return
            with self._changed:
                self._text += data.decode(errors="replace")
                self._changed.notify_all()


@pytest.fixture
def learner(tmp_path):
    terminal = Terminal("tests.multiprocess.learner", tmp_path)
    try:
        terminal.wait_for("step 3")
        yield terminal
    finally:
        terminal.close()


def saved(directory):
    restored = CheckpointStore(directory).restore()
    assert restored.damaged == ()
    return restored.step


def in_a_shell(code):
    """Return what a shell makes of a code: killed by its own SIGINT is 130, too."""
    return 128 - code if code < 0 else code


def test_one_ctrl_c_saves_and_ends_with_its_code(learner, tmp_path):
    with at_most(PATIENCE_S):
        learner.press(CTRL_C)
        assert learner.wait() == INTERRUPTED, learner.text
    assert "SIGINT: stops after this step, and saves; again to end at once" in (
        learner.text
    )
    assert f"saved after step {saved(tmp_path)}" in learner.text
    assert "Traceback" not in learner.text


def test_a_storm_of_ctrl_c_ends_with_the_same_code_and_tears_nothing(learner, tmp_path):
    with at_most(PATIENCE_S):
        learner.press(CTRL_C)
        learner.wait_for("stops after this step")
        learner.press(CTRL_C * 3)
        assert in_a_shell(learner.wait()) == INTERRUPTED, learner.text
    assert saved(tmp_path) >= 3


def test_a_storm_that_does_not_end_is_over_soon(learner, tmp_path):
    with at_most(PATIENCE_S):
        while not learner.ends_within(0.05):
            learner.press(CTRL_C)
        assert in_a_shell(learner.wait()) == INTERRUPTED, learner.text
    assert saved(tmp_path) >= 3


def test_a_terminal_that_goes_away_leaves_a_saved_run(tmp_path):
    terminal = Terminal("tests.multiprocess.learner", tmp_path)
    terminal.wait_for("step 3")
    with at_most(PATIENCE_S):
        terminal.process.send_signal(signal.SIGHUP)
        assert terminal.wait() == PREEMPTED, terminal.text
    terminal.close()
    assert f"saved after step {saved(tmp_path)}" in terminal.text


def test_a_run_whose_input_stalls_is_saved_at_once(tmp_path):
    terminal = Terminal("tests.multiprocess.learner", tmp_path, "stalls")
    terminal.wait_for("step 40")
    with at_most(PATIENCE_S):
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait() == PREEMPTED, terminal.text
    terminal.close()
    assert saved(tmp_path) == 40
