"""Fault 5: somebody asks one process to end, and all stop, saved, at the same step."""

import random
import signal

import pytest

from replicator.checkpoint import CheckpointStore
from replicator.exit_codes import PREEMPTED
from replicator.monitoring.events import read_events
from tests.multiprocess.groups import at_most, group
from tests.multiprocess.loop_worker import STEPS

pytestmark = pytest.mark.slow
WORKER = "tests.multiprocess.loop_worker"
GRACE_S = 90
"""From the signal to the end of all processes: 2 s on a quiet machine."""


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
        with at_most(GRACE_S):
            members[asked].process.send_signal(signal.SIGTERM)
            stops = [stopped_at(member) for member in members]
    assert stops[0] == stops[1]
    step, total = stops[0]
    assert total == 2 * step  # no step of either is lost
    assert at < step < STEPS


def test_a_storm_of_signals_to_all_stops_all_at_the_same_step(tmp_path):
    with without_faults(tmp_path, count=3) as members:
        members[2].wait_for("step 3")
        with at_most(GRACE_S):
            for _ in range(5):
                for member in members:
                    member.process.send_signal(signal.SIGTERM)
                    member.process.send_signal(signal.SIGHUP)
            stops = [stopped_at(member) for member in members]
    assert len(set(stops)) == 1


def whole_run(directory):
    """Make a whole run, with checkpoints, in two processes."""

    def arguments(rank, port):
        return "tests.multiprocess.run_worker", port, 2, rank, directory, ""

    return group(arguments)


def preempted(directory):
    """Start a run, and ask one of its processes to end; return the last step."""
    with whole_run(directory) as members:
        members[1].wait_for("step 7")
        with at_most(GRACE_S):
            members[1].process.send_signal(signal.SIGTERM)
            codes = [member.wait() for member in members]
        told = members[0].report() + members[1].report()
        assert codes == [PREEMPTED, PREEMPTED], told
        assert [member.out.count("finally") for member in members] == [1, 1]
        step = CheckpointStore(directory / "saved").steps()[-1]
        assert told.count(f"SIGTERM: the run was saved after step {step}") == 2
        return step


def test_a_run_that_lost_one_machine_goes_on_bit_for_bit(tmp_path):
    directories = [tmp_path / name for name in ("broken", "whole")]
    for directory in directories:
        directory.mkdir()
    assert 7 < preempted(directories[0]) < 1500
    endings = []
    for directory in directories:
        with whole_run(directory) as members:
            codes = [member.wait() for member in members]
        assert codes == [0, 0], members[0].report() + members[1].report()
        endings += [line for m in members for line in m.out if line.startswith("ended")]
    assert len(endings) == 4
    assert len(set(endings)) == 1


def evaluating(directory, batches, every):
    def arguments(rank, port):
        worker = "tests.multiprocess.evaluate_worker"
        return worker, port, 2, rank, directory, batches, every

    return group(arguments)


@pytest.mark.parametrize("steps", [(4, 6), (6,)])
def test_a_signal_in_an_evaluation_is_heard_there_and_it_is_made_again(tmp_path, steps):
    every = steps[0] if len(steps) > 1 else 100  # then the last one alone
    with evaluating(tmp_path, 100_000, every) as members:
        members[1].wait_for("evaluates")
        with at_most(GRACE_S):
            members[1].process.send_signal(signal.SIGTERM)
            codes = [member.wait() for member in members]
        assert codes == [PREEMPTED, PREEMPTED], members[0].report()
    assert CheckpointStore(tmp_path / "saved").steps() == steps[:1]
    with evaluating(tmp_path, 2, every) as members:
        assert [member.wait() for member in members] == [0, 0], members[0].report()
        # Each process reads its own two batches of 64.
        assert all("ended 6 256" in member.out for member in members)
    found = [
        e["step"] for e in read_events(tmp_path / "told") if e["kind"] == "evaluated"
    ]
    assert tuple(found) == steps
