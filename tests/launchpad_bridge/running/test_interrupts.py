"""Ctrl-C once is graceful, twice immediate, and neither leaves anything."""

import signal
import threading
import time

import pytest

import replicator.launchpad_bridge as lp
from replicator.launchpad_bridge.running import interrupts
from tests.launchpad_bridge.programs import program_of
from tests.launchpad_bridge.scripts import LIMIT_S, start

GRACEFUL = """
def work():
    print("ready", flush=True)
    lp.wait_for_stop()
    print("stopped", flush=True)
run = lp.launch(program_of(lp.PyNode(work)){options})
"""
DEAF = """
def work():
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
run = lp.launch(program_of(lp.PyNode(work)){options})
"""


def interrupted(body, *signums, launch_type="threads"):
    """Start a script, send signals once its node is ready; say how it ended."""
    # Who waits for the grace, or for the script, is killed before.
    options = f", launch_type={launch_type!r}, stop_grace_s=2 * {LIMIT_S}"
    with start(body.replace("{options}", options)) as process:
        in_time = threading.Timer(LIMIT_S, process.kill)
        in_time.start()
        try:
            next(line for line in process.stdout if "ready" in line)
            for signum in signums:
                process.send_signal(signum)
                time.sleep(0.5)
            # Not `communicate`, which does not see what was read ahead with that line.
            out, err = process.stdout.read(), process.stderr.read()
            process.wait()
        finally:
            in_time.cancel()
            process.kill()
        return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize("launch_type", ["threads", "processes"])
@pytest.mark.parametrize("end", ["run.wait()", "", "time.sleep(1000)"])
def test_ctrl_c_stops_nodes_gracefully_wherever_the_script_is(end, launch_type):
    status, out, err = interrupted(
        GRACEFUL + end, signal.SIGINT, launch_type=launch_type
    )
    # Python ends by the signal itself where KeyboardInterrupt was raised.
    assert status in (-signal.SIGINT, 128 + signal.SIGINT), err
    assert "stopped" in out


@pytest.mark.slow
def test_ctrl_c_between_the_end_of_the_script_and_its_wait_stops_nodes_gracefully():
    # Hooks run in the reverse of their order: this one before ours, as a signal would
    # arrive before it.
    end = "threading._register_atexit(os.kill, os.getpid(), signal.SIGINT)"
    status, out, err = interrupted("import os, signal, threading" + GRACEFUL + end)
    assert status == 128 + signal.SIGINT, err
    assert "stopped" in out


@pytest.mark.slow
@pytest.mark.parametrize("launch_type", ["threads", "processes"])
@pytest.mark.parametrize("end", ["run.wait()", ""])
def test_ctrl_c_twice_ends_nodes_that_do_not_stop(end, launch_type):
    signums = [signal.SIGINT, signal.SIGINT]
    status, _, err = interrupted(DEAF + end, *signums, launch_type=launch_type)
    assert status in (-signal.SIGINT, 128 + signal.SIGINT), err


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("end", ["run.wait()", "", "time.sleep(1000)"])
def test_other_signals_stop_nodes_gracefully_and_say_so_in_the_status(end, signum):
    status, out, err = interrupted(GRACEFUL + end, signum)
    assert status == 128 + signum, err
    assert "stopped" in out


@pytest.mark.slow
def test_a_storm_of_signals_ends_the_script_in_time():
    signums = [signal.SIGINT] * 3 + [signal.SIGTERM] * 3
    status, _, err = interrupted(DEAF + "run.wait()", *signums)
    assert status not in (0, -signal.SIGKILL), err


def test_signals_are_given_back_when_no_run_is_left():
    before = signal.getsignal(signal.SIGINT)
    with lp.launch(program_of(lp.PyNode(lp.wait_for_stop, 20))):
        assert signal.getsignal(signal.SIGINT) is interrupts._handle
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_wait_is_raised_once_all_has_stopped():
    run = lp.launch(program_of(lp.PyNode(lp.wait_for_stop, 20)))
    main = threading.main_thread().ident
    threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run.wait(60)
    assert run.is_over
    run.wait(60)
    assert signal.getsignal(signal.SIGINT) is not interrupts._handle
