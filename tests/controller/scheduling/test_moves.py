"""Where slices of lost islands go, over islands that are data."""

import dataclasses
import threading
import types

import pytest

from replicator.controller.islands.protocol import IslandPool
from replicator.controller.scheduling.moves import SliceMoves
from replicator.controller.slices import Slice, SliceDevices
from replicator.errors import IslandLostError, LaunchError

DEVICE = types.SimpleNamespace(kind="cpu", memory_bytes=100, device=None)
PLAN = types.SimpleNamespace(is_current=False)


@dataclasses.dataclass
class PlainIsland:
    """What is known of an island."""

    name: str
    why_lost: str = ""
    devices: tuple = (DEVICE,)


class Machine:
    """Islands of a device each, a slice on the first, and what moves it."""

    def __init__(self, islands, spares=0, another=None, lost=(), memory_bytes=0):
        names = [f"island{n}" for n in range(islands + spares)]
        self.islands = {name: PlainIsland(name) for name in names}
        for name in lost:
            self.islands[name].why_lost = "by a test"
        self.pool = IslandPool(
            islands=self.islands,
            spares=names[islands:],
            another=another and (lambda: self.add(another())),
        )
        self.slice = Slice(
            name="slice0",
            island="island0",
            places=(0,),
            axes={"devices": 1},
            memory_bytes=memory_bytes,
            devices=SliceDevices(),
        )
        told = types.SimpleNamespace(
            island_lost=lambda name: None, island_joined=lambda name: None
        )
        self.slices, self.lock = {"slice0": self.slice}, threading.Lock()
        self.moves = SliceMoves(self.pool, self.slices, self.lock, told)

    def add(self, name):
        self.islands[name] = PlainIsland(name)
        return self.islands[name]

    def lose(self, name):
        self.islands[name].why_lost = "by a test"
        self.moves.lost(name)

    def settle(self):
        for thread in self.moves._threads.values():
            thread.join(60)

    def planned(self, make=lambda: PLAN):
        return self.moves.plan(make, [self.slice])


def test_a_slice_goes_to_a_spare_before_one_is_started():
    machine = Machine(2, spares=1, another=lambda: "started")
    machine.lose("island0")
    assert machine.planned() is PLAN
    assert machine.slice.island == "island2"
    machine.settle()
    assert machine.pool.spares == ["started"]  # in its place


def test_a_slice_goes_to_an_island_that_is_started_then():
    machine = Machine(2, another=lambda: "started")
    machine.lose("island0")
    machine.planned()
    assert machine.slice.island == "started"


def test_a_slice_goes_to_another_island_where_none_can_be_started():
    def another():
        raise LaunchError("no room")

    machine = Machine(2, another=another)
    machine.lose("island0")
    machine.planned()
    assert machine.slice.island == "island1"


def test_a_spare_that_was_lost_takes_no_slice():
    machine = Machine(1, spares=2)
    machine.lose("island1")
    machine.lose("island0")
    machine.planned()
    assert machine.slice.island == "island2"


def test_a_spare_that_was_lost_with_another_island_is_replaced_once():
    names = iter(["third", "fourth", "fifth"])
    machine = Machine(1, spares=1, another=lambda: next(names))
    machine.islands["island1"].why_lost = "by a test"  # which nobody was told yet
    machine.lose("island0")
    machine.planned()
    machine.lose("island1")
    machine.settle()
    assert machine.slice.island == "third"
    assert machine.pool.spares == ["fourth"]
    assert next(names) == "fifth"


def test_an_island_that_is_to_be_a_spare_is_offered_to_no_slice():
    machine, offered = Machine(2, spares=1), []

    def another():
        island = machine.add("started")
        with machine.lock:
            offered.extend(each.name for each in machine.moves.islands())
        return island

    machine.moves._pool = dataclasses.replace(machine.pool, another=another)
    machine.lose("island0")
    machine.settle()
    assert offered == ["island1", "island2"]
    assert machine.pool.spares == ["started"]


def test_an_island_that_was_lost_before_anybody_listened_is_left_too():
    machine = Machine(2, lost=["island0"])
    machine.planned()
    assert machine.slice.island == "island1"


def test_a_plan_that_was_made_while_a_slice_moved_is_made_again():
    machine, homes = Machine(3), []

    def make():
        homes.append(machine.slice.island)
        if len(homes) < 3:
            machine.lose(machine.slice.island)
            raise IslandLostError("while it was planned")
        return PLAN

    assert machine.planned(make) is PLAN
    assert homes == ["island0", "island1", "island2"]


def test_a_slice_that_nothing_has_devices_for_is_refused_at_each_call():
    machine = Machine(1)
    machine.lose("island0")
    for _ in range(2):
        with pytest.raises(IslandLostError, match="no other island has 1 devices"):
            machine.planned()


def test_a_slice_whose_memory_no_other_island_has_free_is_refused_for_that():
    machine = Machine(2, memory_bytes=60)
    machine.slices["slice1"] = dataclasses.replace(
        machine.slice, name="slice1", island="island1"
    )
    machine.lose("island0")
    with pytest.raises(IslandLostError, match="for it, 60 bytes free on each"):
        machine.planned()


def test_nothing_moves_after_the_end():
    machine = Machine(2)
    machine.moves.close()
    machine.lose("island0")
    with pytest.raises(IslandLostError, match="`pw` was closed"):
        machine.planned()
