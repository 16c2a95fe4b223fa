"""Where slices are placed: on the devices that have the fewest."""

import dataclasses

import pytest

from replicator.controller.islands.protocol import IslandDevice
from replicator.controller.slices import Slice, SliceDevices, place, wish
from replicator.errors import ArgumentError


@dataclasses.dataclass
class Described:
    """An island that nothing runs on."""

    name: str
    devices: list


def islands(*sizes, kind="cpu"):
    device = IslandDevice(kind=kind, memory_bytes=100, device=None)
    return [Described(f"island{n}", [device] * size) for n, size in enumerate(sizes)]


def placed(among, *asked):
    slices = []
    for number, (n, options) in enumerate(asked):
        wanted = dict(axes=None, kind=None, island=None, memory_bytes=0) | options
        island, places = place(wish(n, **wanted), among, slices)
        slices.append(
            Slice(
                name=f"slice{number}",
                island=island.name,
                places=places,
                axes={"devices": n},
                memory_bytes=wanted["memory_bytes"],
                devices=SliceDevices(),
            )
        )
    return [(each.island, each.places) for each in slices]


def test_slices_go_to_the_emptiest_island():
    assert placed(islands(2, 2), (2, {}), (1, {}), (1, {})) == [
        ("island0", (0, 1)),
        ("island1", (0,)),
        ("island1", (1,)),
    ]


def test_a_slice_goes_where_it_is_wished():
    assert placed(islands(1, 1), (1, {"island": "island1"})) == [("island1", (0,))]


def test_more_slices_than_devices_share_them():
    assert placed(islands(1), (1, {}), (1, {})) == [("island0", (0,))] * 2


def test_memory_that_is_taken_is_not_free():
    asked = {"memory_bytes": 60}
    assert placed(islands(1, 1), (1, asked), (1, asked))[1] == ("island1", (0,))
    with pytest.raises(ArgumentError, match="memory that is free, got"):
        placed(islands(1), (1, asked), (1, asked))
