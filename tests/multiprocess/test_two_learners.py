"""Fault 19: two learners on one directory, and exactly one of them writes."""

import os
import signal

import pytest

from replicator.checkpoint import CheckpointStore
from tests.multiprocess.groups import start
from tests.multiprocess.processes import stop

pytestmark = pytest.mark.slow
LEARNER = "tests.multiprocess.learner"


@pytest.fixture
def learner(tmp_path):
    """Start learners on one directory; kill what is left of them."""
    members = []

    def begin(*arguments):
        members.append(start([LEARNER, tmp_path / "run", *arguments]))
        return members[-1]

    yield begin
    for member in members:
        if member.process.poll() is None:
            os.killpg(member.process.pid, signal.SIGKILL)
        member.wait()
        member.process.stdout.close()
        member.process.stderr.close()


def test_a_second_learner_is_refused_and_told_who_is_there(learner):
    first = learner()
    first.wait_for("step 3")
    second = learner()
    assert second.wait() == 1
    said = second.report()
    assert "CheckpointInUseError" in said
    assert f"process {first.process.pid} on " in said
    first.wait_for("step 8")  # it never noticed


def test_a_learner_that_stood_still_still_keeps_the_second_out(learner):
    first = learner()
    first.wait_for("step 3")
    stop(first.process)
    second = learner()
    assert second.wait() == 1
    assert f"process {first.process.pid} on " in second.report()
    first.process.send_signal(signal.SIGCONT)
    first.wait_for("step 40")


def test_where_locks_do_not_hold_the_stale_learner_is_fenced(learner, tmp_path):
    first = learner("without locks")
    first.wait_for("step 3")
    stop(first.process)
    second = learner("without locks")
    second.wait_for("step 40")
    first.process.send_signal(signal.SIGCONT)
    assert first.wait() == 1
    assert "must have this run as its only writer, got process" in first.report()
    assert f"process {second.process.pid} on " in first.report()
    second.wait_for("step 60")
    # What is there was written by the second: of its generation, and whole.
    os.killpg(second.process.pid, signal.SIGKILL)
    second.wait()
    assert CheckpointStore(tmp_path / "run").restore().damaged == ()
