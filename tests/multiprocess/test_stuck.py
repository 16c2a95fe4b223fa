"""Fault 22: one process is alive but stuck. All say where they are, and all end."""

import re

import pytest

from replicator.exit_codes import HUNG
from replicator.monitoring.events import read_events
from tests.multiprocess.groups import group
from tests.multiprocess.processes import stop

pytestmark = pytest.mark.slow
WORKER = "tests.multiprocess.loop_worker"


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """Let a hook of rank 1 get stuck; return the directory and the processes."""
    directory = tmp_path_factory.mktemp("hung")

    def arguments(rank, port):
        return WORKER, port, 2, rank, directory, 5, "stuck rank 1 at step 5"

    with group(arguments) as members:
        codes = [member.wait() for member in members]
    return directory, members, codes


def test_every_process_ends_with_the_code_that_asks_for_a_restart(hung):
    _, members, codes = hung
    assert codes == [HUNG, HUNG], members[0].report() + members[1].report()


def test_every_process_leaves_its_stacks(hung):
    directory, _, _ = hung
    stacks = sorted((directory / "stacks").iterdir())
    assert [path.name.partition("-")[0] for path in stacks] == ["0", "1"]
    assert "sleep_forever" in stacks[1].read_text()
    assert "sleep_forever" not in stacks[0].read_text()


def test_every_report_names_the_process_that_is_behind(hung):
    _, members, _ = hung
    for member in members:
        said = member.report()
        assert "Ending all 2 processes with exit code 76" in said
        assert re.search(r"process 1: in `report` .*<- behind", said), said
        assert not re.search(r"process 0: .*<- behind", said), said
        assert "Look first at what holds up process 1." in said


def test_the_journal_of_every_process_says_so(hung):
    directory, _, _ = hung
    hangs = [event for event in read_events(directory) if event["kind"] == "hung"]
    assert sorted(event["process"] for event in hangs) == [0, 1]


def test_a_process_that_is_stopped_is_named_as_silent(tmp_path):
    def arguments(rank, port):
        return WORKER, port, 2, rank, tmp_path, 5, ""

    with group(arguments) as members:
        members[1].wait_for("step 5")
        stop(members[1].process)
        assert members[0].wait() == HUNG, members[0].report()
        assert re.search(r"process 1: no answer .*<- behind", members[0].report())


def test_a_process_that_sleeps_inside_its_step_shows_where(tmp_path):
    def arguments(rank, port):
        return WORKER, port, 2, rank, tmp_path, 5, "sleep in step"

    with group(arguments) as members:
        codes = [member.wait() for member in members]
    said = members[0].report()
    assert codes == [HUNG, HUNG], said
    # Both wait in the same step: what holds its devices up is told by the callback.
    assert "process 1: in `step`" in said.partition("<- behind")[0], said
    assert "Look first at what holds up process 1." in said
    of_0, _, of_1 = said.partition("process 1: in `step`")
    assert re.search(r"at .*loop_worker.py:\d+ in sleep_in_step_5", of_1), said
    assert "in sleep_in_step_5" not in of_0.partition("process 0: in `step`")[2], said


def test_a_whole_run_that_is_stuck_ends_everywhere(tmp_path):
    def arguments(rank, port):
        worker, schedule = "tests.multiprocess.run_worker", "stuck rank 1 at step 5"
        return worker, port, 2, rank, tmp_path, schedule

    with group(arguments) as members:
        codes = [member.wait() for member in members]
    assert codes == [HUNG, HUNG], members[0].report() + members[1].report()
    said = members[0].report()
    assert re.search(r"process 1: in `report` .*<- behind", said), said
