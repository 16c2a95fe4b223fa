"""Islands in processes of their own: callbacks, errors, and how islands end."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading

import jax
import numpy as np
import pytest

from replicator import controller
from replicator.errors import ArgumentError, IslandLostError, OpFailedError

pytestmark = pytest.mark.slow

ONES = np.ones(2, np.float32)
LIMIT_S = 120


def called(function):
    """Return a function of arrays that calls back into Python."""

    def call(x):
        return jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return call


def process_id(x):
    return np.full_like(x, os.getpid())


def fail(x):
    raise ValueError("no such luck")


@pytest.fixture(scope="module")
def pw():
    with controller.start(islands=2, devices=1, lost_after_s=300) as opened:
        yield opened


def on(pw, number):
    return pw.slice(1, island=f"island{number}")


def pid_of(pw, number):
    return int(pw.fn(called(process_id), on(pw, number))(np.ones(1)).result(LIMIT_S)[0])


def test_each_island_is_a_process_that_calls_functions_back(pw):
    assert len({pid_of(pw, 0), pid_of(pw, 1), os.getpid()}) == 3


def test_derivatives_of_ops_that_print_run_there(pw):
    def printed(x):
        jax.debug.print("the sum is {}", x.sum())
        return jax.nn.relu(x).sum()

    op = pw.fn(printed, on(pw, 1))
    gradient = pw.program(lambda x: jax.grad(lambda x: op(x) * 2.0)(x))(ONES)
    assert np.asarray(gradient).tolist() == [2.0, 2.0]


def test_an_error_names_op_island_and_line_on_every_island_behind_it(pw):
    bad = pw.fn(called(fail), on(pw, 0))
    behind = pw.fn(lambda x: x + 1, on(pw, 1))
    with pytest.raises(OpFailedError, match="no such luck") as raised:
        pw.program(lambda x: behind(bad(x)))(ONES).result(LIMIT_S)
    assert (raised.value.op, raised.value.island) == ("call", "island0")
    assert "test_process_islands.py" in raised.value.line
    assert np.asarray(behind(ONES)).tolist() == [2.0, 2.0]


def test_what_was_sent_is_what_it_was_though_its_memory_is_taken(pw):
    take = pw.fn(lambda x: x * 0, on(pw, 0), donate=(0,))
    copy = pw.fn(lambda x: x + 1, on(pw, 1))
    given = pw.put(np.ones(1 << 16, np.float32), take.slice)
    copied = copy(given)
    take(given)
    assert np.asarray(copied).min() == 2.0


def test_a_function_that_does_not_pickle_is_refused_by_name(pw):
    lock = threading.Lock()

    def locked(x):
        with lock:
            return np.asarray(x)

    with pytest.raises(ArgumentError, match="functions that can be pickled"):
        pw.fn(called(locked), on(pw, 0))(ONES)


def test_a_lost_island_fails_what_depends_on_it_and_nothing_else():
    with controller.start(islands=3, devices=1, lost_after_s=40) as pw:
        ops = [pw.fn(lambda x: x + 1, on(pw, n)) for n in range(3)]
        kept, pids = ops[0](ONES), [pid_of(pw, n) for n in range(2)]
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(IslandLostError, match="lost") as raised:
            ops[1](kept).result(LIMIT_S)  # waits for what island0 never sends
        assert raised.value.island == "island0"
        assert np.asarray(ops[2](ops[1](ONES))).tolist() == [3.0, 3.0]
        with pytest.raises(IslandLostError, match="SIGKILL"):
            kept.result(LIMIT_S)

        stopped = os.pidfd_open(pids[1])
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(IslandLostError, match="island1 was lost, which gave no s"):
            ops[1](ONES).result(LIMIT_S)
        assert select.select([stopped], [], [], LIMIT_S)[0]  # it is killed
        os.close(stopped)
        assert np.asarray(ops[2](ONES)).tolist() == [2.0, 2.0]


def wait_for_ever(x):
    threading.Event().wait()


def test_ctrl_c_ends_islands_that_are_at_work():
    island = -1

    def interrupted():
        nonlocal island
        with controller.start(islands=1, devices=1, lost_after_s=300) as pw:
            island = os.pidfd_open(pid_of(pw, 0))
            pw.fn(called(wait_for_ever), on(pw, 0))(ONES)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert select.select([island], [], [], LIMIT_S)[0]
    os.close(island)


SCRIPT = """
    import os, sys
    import numpy as np
    from tests.controller.test_process_islands import pid_of
    from replicator import controller

    with controller.start(islands=1, devices=1, lost_after_s=300) as pw:
        print(pid_of(pw, 0), flush=True)
        sys.stdin.read()
"""


def test_no_island_outlives_a_controller_that_is_killed():
    script = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(script, stderr=subprocess.DEVNULL, **pipes) as process:
        island = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        process.wait(LIMIT_S)
        assert select.select([island], [], [], LIMIT_S)[0]
        os.close(island)
