"""The harness itself: no process outlives a test, and failures show what was said."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.multiprocess.processes import assert_killed, run_processes, values

pytestmark = pytest.mark.slow


def hang(directory):
    print("it hangs here", flush=True)
    Path(directory, "pid").write_text(str(os.getpid()))
    time.sleep(1000)


def fail():
    raise ValueError("it fails here")


def die_or_hang():
    import jax

    if jax.process_index():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_hangs_is_killed_and_shown(tmp_path):
    path, options = tmp_path / "pid", {"processes": 1, "devices": 1}

    def is_late():
        return path.exists() and path.read_text()

    with pytest.raises(AssertionError, match="it hangs here"):
        run_processes(hang, tmp_path, is_late=is_late, directory=tmp_path, **options)
    assert not is_alive(int(path.read_text()))


def test_what_fails_is_shown(tmp_path):
    with pytest.raises(AssertionError, match="ValueError: it fails here"):
        values(run_processes(fail, tmp_path, processes=1, devices=1))


def test_once_one_was_killed_the_others_are(tmp_path):
    ended = run_processes(die_or_hang, tmp_path, processes=2, devices=1)
    assert_killed(ended)
