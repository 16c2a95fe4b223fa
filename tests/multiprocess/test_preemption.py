"""Fault 5: somebody asks one process to end, and all stop, saved, at the same step."""

import random
import signal

import pytest

from replicator.checkpoint import CheckpointStore
from replicator.exit_codes import PREEMPTED
from tests.multiprocess.groups import group

pytestmark = pytest.mark.slow
WORKER = "tests.multiprocess.loop_worker"


def stopped_at(member):
    """Return the last step of a process, and the sum that its state holds."""
    assert member.wait() == PREEMPTED, member.report()
    (line,) = [line for line in member.out if line.startswith("ended")]
    _, step, total = line.split()
    return int(step), float(total)


def without_faults(directory, count=2):
    def arguments(rank, port):
        return WORKER, port, count, rank, directory, 60, ""

    return group(arguments, count)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_process_stops_all_at_the_same_step(tmp_path, asked):
    at = random.Random(asked).randrange(1, 50)
    with without_faults(tmp_path) as members:
        members[asked].wait_for(f"step {at}")
        members[asked].process.send_signal(signal.SIGTERM)
        stops = [stopped_at(member) for member in members]
    assert stops[0] == stops[1]
    step, total = stops[0]
    assert total == 2 * step  # no step of either is lost
    assert at < step < 2000


def test_a_storm_of_signals_to_all_stops_all_at_the_same_step(tmp_path):
    with without_faults(tmp_path, count=3) as members:
        members[2].wait_for("step 3")
        for _ in range(5):
            for member in members:
                member.process.send_signal(signal.SIGTERM)
                member.process.send_signal(signal.SIGHUP)
        stops = [stopped_at(member) for member in members]
    assert len(set(stops)) == 1


def run_group(directory, schedule):
    """Make a whole run in two processes; return their codes and what they said."""

    def arguments(rank, port):
        return "tests.multiprocess.run_worker", port, 2, rank, directory, schedule

    with group(arguments) as members:
        codes = [member.wait() for member in members]
    return codes, members


def test_a_run_that_lost_one_machine_goes_on_bit_for_bit(tmp_path):
    directories = [tmp_path / name for name in ("broken", "whole")]
    for directory in directories:
        directory.mkdir()
    codes, members = run_group(directories[0], "terminate rank 1 at step 7")
    told = members[0].report() + members[1].report()
    assert codes == [PREEMPTED, PREEMPTED], told
    assert [member.out.count("finally") for member in members] == [1, 1]
    step = CheckpointStore(directories[0] / "saved").steps()[-1]
    assert 7 < step < 1500
    for member in members:
        assert f"SIGTERM: the run was saved after step {step}" in member.report()
    endings = []
    for directory in directories:
        codes, members = run_group(directory, "")
        assert codes == [0, 0], members[0].report() + members[1].report()
        endings += [line for m in members for line in m.out if line.startswith("ended")]
    assert len(endings) == 4
    assert len(set(endings)) == 1
