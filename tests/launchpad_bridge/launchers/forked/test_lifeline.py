"""What a guard deletes of a run whose launcher is gone."""

import os
import subprocess
import sys

from replicator.launchpad_bridge.launchers.forked import lifeline


def test_logs_stay_with_the_lock_by_which_the_next_launch_sweeps_them(tmp_path):
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "tls").mkdir()
    for name in ("launcher.lock", "secret", "logs/node.log", "tls/key"):
        (run / name).touch()
    lifeline.delete(run, keep=run / "logs")
    assert sorted(os.listdir(run)) == ["launcher.lock", "logs"]
    assert (run / "logs" / "node.log").exists()


def test_where_logs_lie_elsewhere_nothing_stays(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "launcher.lock").touch()
    lifeline.delete(run, keep=tmp_path / "logs")
    assert not run.exists()


TWO_SIGNALS = """
import os, signal, subprocess, threading
from replicator.launchpad_bridge.launchers.forked import lifeline

both = {signal.SIGTERM, signal.SIGHUP}
signal.pthread_sigmask(signal.SIG_BLOCK, both)
for number in both:
    signal.pthread_kill(threading.get_ident(), number)
child = subprocess.Popen(["sleep", "600"])
# Both are delivered at once, in what waits.
lifeline._wait = lambda *_: signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
told = {"lifeline": 0, "launcher": os.getppid(), "folder": "", "keep": ""}
assert lifeline._guard(0, told) == 0
assert not lifeline.children()
"""


def test_two_signals_at_once_leave_nothing_behind():
    subprocess.run([sys.executable, "-c", TWO_SIGNALS], check=True, timeout=60)
