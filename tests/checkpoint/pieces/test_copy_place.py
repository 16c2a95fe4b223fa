"""A save copies the state on its devices, or to the host, and tells of lack of room."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.checkpoint.pieces.copy_place import lack_of_memory_explained
from replicator.checkpoint.pieces.grid import Box
from replicator.checkpoint.pieces.held import Source, copy_regions
from replicator.checkpoint.pieces.plan import Region
from replicator.errors import ArgumentError, DeviceMemoryError

XLA_SAID = "RESOURCE_EXHAUSTED: Out of memory allocating 1600000000 bytes."


@pytest.mark.parametrize("place", ["device", "host"])
def test_saved_state_is_that_before_its_buffers_were_donated(tmp_path, place):
    state = {"w": jnp.arange(6.0), "key": jax.random.key(3)}
    keys = np.asarray(jax.random.key_data(state["key"]))
    with CheckpointStore(tmp_path, copy=place) as store:
        assert store.save_nowait(Snapshot(step=1, arrays=state))
        state["w"].delete()
        store.wait()
        restored = store.restore()
    np.testing.assert_array_equal(restored.arrays["w"], np.arange(6.0))
    np.testing.assert_array_equal(jax.random.key_data(restored.arrays["key"]), keys)


def buffers():
    shards = (shard for each in jax.live_arrays() for shard in each.addressable_shards)
    return {shard.data.unsafe_buffer_pointer() for shard in shards}


def test_copy_to_the_host_makes_no_array_on_a_device():
    array = jnp.arange(4.0)
    there = buffers()
    region = Region(leaf=0, box=Box(start=(1,), shape=(2,)))
    source = Source(region=region, number=0, piece=Box(start=(0,), shape=(4,)))
    (copy,) = copy_regions([array], [source], "host")
    assert isinstance(copy, np.ndarray)
    assert copy.tolist() == [1, 2]
    assert not np.shares_memory(copy, np.asarray(array))
    assert buffers() <= there  # those of other tests may be collected meanwhile


def test_lack_of_room_for_the_copy_is_our_error_and_names_the_way_out():
    with (
        pytest.raises(DeviceMemoryError, match='checkpoint_copy="host"') as caught,
        lack_of_memory_explained(),
    ):
        raise jax.errors.JaxRuntimeError(XLA_SAID)
    assert "allocating 1600000000 bytes" in str(caught.value)


def test_other_errors_of_xla_pass():
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="no such"),
        lack_of_memory_explained(),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such thing")


def test_another_place_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="`copy` must be one of 'device', 'host'"):
        CheckpointStore(tmp_path, copy="disk")
