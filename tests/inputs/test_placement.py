import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from replicator.base.mesh import replica_mesh
from replicator.errors import BatchError
from replicator.inputs import batch_spec, place
from replicator.inputs.placement import stack_batches


def _replicas_data(array):
    if isinstance(array, np.ndarray):  # one CPU device takes host memory as it is
        return [array]
    return [np.asarray(shard.data) for shard in array.addressable_shards]


@pytest.mark.parametrize(
    ("accumulate", "steps_per_call", "spec"),
    [
        (1, 1, P("replica")),
        (4, 1, P(None, "replica")),
        (1, 5, P(None, "replica")),
        (4, 5, P(None, None, "replica")),
    ],
)
def test_batches_are_cut_over_replicas_behind_steps_and_microbatches(
    accumulate, steps_per_call, spec
):
    assert batch_spec(accumulate, steps_per_call) == spec


@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_replica_r_holds_block_r_of_each_microbatch(replicas, accumulate):
    x = np.arange(64).reshape(32, 2)
    blocks = x.reshape(accumulate, replicas, -1, 2)
    placed = place({"x": x}, replica_mesh(replicas), accumulate=accumulate)["x"]

    for replica, held in enumerate(_replicas_data(placed)):
        np.testing.assert_array_equal(
            held.reshape(blocks[:, 0].shape), blocks[:, replica]
        )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_go_in_front(accumulate, mesh):
    x = np.arange(48).reshape(3, 16)
    placed = place(x, mesh, accumulate=accumulate, steps_per_call=3)

    assert placed.shape == ((3, 16) if accumulate == 1 else (3, 2, 8))
    np.testing.assert_array_equal(np.asarray(placed).reshape(3, 16), x)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("spread", [False, True])
def test_device_arrays_are_placed_too(spread, accumulate, mesh):
    x = jax.device_put(np.arange(16), replica_mesh(8).devices[3])
    placed = place(place(x, mesh) if spread else x, mesh, accumulate=accumulate)

    assert placed.sharding.spec == batch_spec(accumulate)
    np.testing.assert_array_equal(np.asarray(placed).ravel(), np.arange(16))


def test_a_device_array_in_its_place_stays_there(mesh):
    x = place(np.arange(16), mesh)
    with jax.transfer_guard("disallow"):
        placed = place(x, mesh)

    pointers = [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    assert pointers == [
        shard.data.unsafe_buffer_pointer() for shard in placed.addressable_shards
    ]


def test_device_arrays_are_stacked_on_their_device(mesh):
    parts = [{"x": jax.device_put(np.arange(8) + i)} for i in range(2)]
    stacked = stack_batches(parts)["x"]

    assert isinstance(stacked, jax.Array)
    np.testing.assert_array_equal(stacked, [np.arange(8), np.arange(8) + 1])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": np.zeros(12)},
            "`global_batch` must divide evenly over 8 replicas, got 12. Use 8 or 16.",
        ),
        (
            {"x": np.zeros(8, np.float32), "y": np.zeros(16, np.float32)},
            "`batch` must hold arrays that agree in their batch axis, axis 0, got `x` "
            "float32[8], `y` float32[16]. Give each leaf one row per example.",
        ),
        (
            {},
            "`batch` must hold arrays that agree in their batch axis, axis 0, got "
            "no arrays. Give each leaf one row per example.",
        ),
        (
            np.float32(1),
            "`batch` must hold arrays that agree in their batch axis, axis 0, got "
            "float32[]. Give each leaf one row per example.",
        ),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch, message, mesh):
    with pytest.raises(BatchError, match=re.escape(message)):
        place(batch, mesh)
