"""Processes of an island that do not start: named, and none is left."""

import os

import pytest

from replicator.controller.islands import started
from replicator.errors import LaunchError


class Process(started.StartedIsland):
    """A process of which only the output is there."""

    def __init__(self, devices, share, group):
        self.reading, self.writing = map(os.fdopen, os.pipe(), ("rb", "wb"))
        self.number = group.number
        self.ends = 0

    @property
    def output(self):
        return self.reading

    def end(self, wait_s=0.0):
        self.ends += 1
        self.writing.close()
        self.reading.close()
        return "exited with 3"


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(started, "StartedIsland", Process)
    found = started.StartedGroup(1, 2, 2)
    yield found
    found.end()


def test_addresses_are_in_the_order_of_the_processes(group):
    for process in reversed(group.processes):
        process.writing.write(b'"at %d"\n' % process.number)
        process.writing.flush()
    assert [each.text for each in group.addresses()] == ["at 0", "at 1"]


def test_a_process_that_ends_is_named_while_others_wait_for_it(group):
    group.processes[1].writing.close()
    with pytest.raises(LaunchError, match="not be started: it exited with 3"):
        group.addresses()


def test_processes_that_say_nothing_are_late(group, monkeypatch):
    monkeypatch.setattr(started, "_START_S", 0.0)
    with pytest.raises(LaunchError, match="it did not serve within 0 s"):
        group.addresses()


@pytest.mark.parametrize("there", [0, 1])
def test_what_keeps_a_process_from_starting_is_raised_as_it_is(monkeypatch, there):
    made = []

    def process(*args):
        if len(made) == there:
            raise OSError("no room")
        made.append(Process(*args))
        return made[-1]

    monkeypatch.setattr(started, "StartedIsland", process)
    with pytest.raises(OSError, match="no room"):
        started.StartedGroup(1, 2, 2)
    assert [each.ends for each in made] == [1] * there
