"""A strategy that ended its process is known to the next one."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from replicator.strategies import Machine, data_parallel, fsdp
from replicator.strategies.choose import Candidate
from replicator.tuning.choosing.attempts import Attempts, without_ended
from replicator.tuning.choosing.candidates import Work

WORK = Work(variables=(), examples=8, batch_bytes=8, flops={}, product_bytes=0)
MACHINE = Machine.from_topology("h100:8")
DIES = """
import os, signal
from tests.tuning.choosing.test_attempts import attempts
with attempts().noted("fsdp"):
    os.kill(os.getpid(), signal.{})
"""


def attempts():
    return Attempts(WORK, MACHINE)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "left"), [("SIGABRT", {"fsdp"}), ("SIGTERM", set())])
def test_what_ended_a_process_is_left_out_by_the_next_unless_it_was_asked_to_stop(
    name, left
):
    command = [sys.executable, "-c", DIES.format(name)]
    died = subprocess.run(command, env=os.environ, check=False)
    assert died.returncode == -signal.Signals[name]
    assert attempts().ended == left


def test_what_another_run_tries_has_not_ended_it():
    with attempts().noted("fsdp"):
        assert attempts().ended == set()
        with attempts().noted("zero1"):
            pass
        assert len(list(attempts().files.parent.iterdir())) == 1
    assert attempts().ended == set()


def test_what_raises_has_not_ended_the_process():
    with pytest.raises(KeyboardInterrupt), attempts().noted("fsdp"):
        raise KeyboardInterrupt
    assert attempts().ended == set()


def test_another_step_does_not_share_it():
    left = str(attempts().files).replace("*", "1-ab")
    pathlib.Path(left).write_text("fsdp")
    other = Work(variables=(), examples=9, batch_bytes=8, flops={}, product_bytes=0)
    assert Attempts(other, MACHINE).ended == set()
    assert attempts().ended == {"fsdp"}


def test_what_ended_a_process_is_tried_again_where_nothing_else_is_left():
    both = [Candidate(name=s.name, strategy=s) for s in (data_parallel(), fsdp())]
    found = without_ended(both, {"fsdp"})
    assert [each.status for each in found] == ["waiting", "failed"]
    found = without_ended(both, {"fsdp", "data_parallel"})
    assert [each.status for each in found] == ["waiting", "waiting"]
