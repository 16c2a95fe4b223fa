"""A checkpoint is restored under any layout, and each byte is read once."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicator.base.padded import Padded, unpadded
from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.checkpoint.pieces import reads
from tests.checkpoint.states import bits

ROWS, COLUMNS = 96, 1024  # 393 kB of float32: an array of its own


def mesh(*sizes, is_reversed=False):
    devices = np.array(jax.devices()[: int(np.prod(sizes))])
    devices = devices[::-1] if is_reversed else devices
    return Mesh(devices.reshape(sizes), ("a", "b")[: len(sizes)])


LAYOUTS = {
    "one device": (mesh(1), PartitionSpec()),
    "whole on 8": (mesh(8), PartitionSpec()),
    "rows over 8": (mesh(8), PartitionSpec("a")),
    "columns over 8": (mesh(8), PartitionSpec(None, "a")),
    "rows over 3": (mesh(3), PartitionSpec("a")),
    "rows over 8, backwards": (mesh(8, is_reversed=True), PartitionSpec("a")),
    "rows over 2 of 4": (mesh(2, 4), PartitionSpec("a")),
    "both axes": (mesh(2, 4), PartitionSpec("b", "a")),
    "rows over both": (mesh(2, 4), PartitionSpec(("a", "b"))),
}


def state(layout):
    sharding = NamedSharding(*LAYOUTS[layout])
    large = jnp.arange(ROWS * COLUMNS, dtype=jnp.float32).reshape(ROWS, COLUMNS)
    small = jnp.arange(24 * 8, dtype=jnp.int16).reshape(24, 8)
    return jax.device_put({"large": large, "small": small}, sharding)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directories = {layout: tmp_path_factory.mktemp("layout") for layout in LAYOUTS}
    for layout, directory in directories.items():
        with CheckpointStore(directory) as store:
            store.save(Snapshot(step=1, arrays=state(layout)))
    return directories


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_what_is_saved_under_one_layout_is_restored_under_another(saved, before, after):
    like = state(after)
    arrays = CheckpointStore(saved[before]).restore(like).arrays
    assert bits(arrays) == bits(like)
    for name in like:
        assert arrays[name].sharding == like[name].sharding
        for one, other in zip(
            arrays[name].addressable_shards, like[name].addressable_shards, strict=True
        ):
            np.testing.assert_array_equal(one.data, other.data)


def padded(size, count):
    sharding = NamedSharding(mesh(count), PartitionSpec("a"))
    room = -(-size // count) * count
    rows = jnp.arange(size * 512, dtype=jnp.float32).reshape(size, 512)
    rows = jnp.pad(rows, ((0, room - size), (0, 0)), constant_values=7)
    return Padded(jax.device_put(rows, sharding), (size, 512))


@pytest.mark.parametrize("size", [9, 41, 127])  # the first is small
@pytest.mark.parametrize(("before", "after"), [(8, 8), (8, 3), (2, 8)])
def test_padding_is_neither_saved_nor_needed(tmp_path, size, before, after):
    with CheckpointStore(tmp_path) as store:
        store.save(Snapshot(step=1, arrays={"w": padded(size, before)}))
        like = {"w": padded(size, after)}
        restored = store.restore(like).arrays
        assert bits(unpadded(restored)) == bits(unpadded(like))
        assert restored["w"].padded.sharding == like["w"].padded.sharding
        assert store.restore().arrays["w"].shape == (size, 512)


def test_shardings_are_those_that_are_asked_for(saved):
    like = jax.tree.map(np.asarray, state("one device"))
    rows = NamedSharding(*LAYOUTS["rows over 8"])
    store = CheckpointStore(saved["both axes"])
    for shardings in (rows, [rows, rows], {"large": rows, "small": rows}):
        arrays = store.restore(like, shardings=shardings).arrays
        assert bits(arrays) == bits(like)
        assert {leaf.sharding for leaf in jax.tree.leaves(arrays)} == {rows}


@pytest.mark.parametrize("after", LAYOUTS)
def test_no_byte_is_read_twice(saved, after, monkeypatch):
    read = []
    joined = reads.joined

    def record(boxes, chunk):
        read.append((joined(boxes, chunk), chunk))
        return read[-1][0]

    monkeypatch.setattr(reads, "joined", record)
    CheckpointStore(saved["rows over 8"]).restore(state(after))
    for boxes, chunk in read:
        touched = [
            index
            for box in boxes
            for index in itertools.product(
                *(
                    range(at // n, -(-(at + size) // n))
                    for at, size, n in zip(box.start, box.shape, chunk, strict=True)
                )
            )
        ]
        assert len(touched) == len(set(touched))
