"""The harness itself: no process outlives a test, and failures show what was said."""

import os
import signal
import time

import pytest

from tests.multiprocess.processes import run_processes, values

pytestmark = pytest.mark.slow


def hang(directory):
    print("it hangs here", flush=True)
    with open(f"{directory}/{os.getpid()}", "w"):
        pass
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
    with pytest.raises(AssertionError, match="it hangs here"):
        run_processes(
            hang, tmp_path, processes=1, devices=1, timeout_s=20, directory=tmp_path
        )
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]
    assert pids
    assert not any(map(is_alive, pids))


def test_what_fails_is_shown(tmp_path):
    with pytest.raises(AssertionError, match="ValueError: it fails here"):
        values(run_processes(fail, tmp_path, processes=1, devices=1))


def test_once_one_was_killed_the_others_are(tmp_path):
    ended = run_processes(die_or_hang, tmp_path, processes=2, devices=1)
    assert [each.code for each in ended] == [-signal.SIGKILL] * 2
