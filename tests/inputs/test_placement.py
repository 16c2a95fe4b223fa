import re

import jax
import numpy as np
import pytest

from replicator.base.mesh import replica_spec
from replicator.errors import BatchError
from replicator.inputs import place
from replicator.inputs.placement import batch_axis, placed_shapes, stack_batches
from tests.helpers import replicated_layout


def _replicas_data(array):
    if isinstance(array, np.ndarray):  # one CPU device takes host memory as it is
        return [array]
    return [np.asarray(shard.data) for shard in array.addressable_shards]


@pytest.mark.parametrize(
    ("accumulate", "steps_per_call", "axis"),
    [(1, 1, 0), (4, 1, 1), (1, 5, 1), (4, 5, 2)],
)
def test_examples_come_behind_steps_and_microbatches(accumulate, steps_per_call, axis):
    assert batch_axis(accumulate, steps_per_call) == axis


@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_replica_r_holds_block_r_of_each_microbatch(replicas, accumulate):
    x = np.arange(64).reshape(32, 2)
    blocks = x.reshape(accumulate, replicas, -1, 2)
    placed = place({"x": x}, replicated_layout(replicas), accumulate=accumulate)["x"]

    for replica, held in enumerate(_replicas_data(placed)):
        np.testing.assert_array_equal(
            held.reshape(blocks[:, 0].shape), blocks[:, replica]
        )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_go_in_front(accumulate, layout):
    x = np.arange(48).reshape(3, 16)
    placed = place(x, layout, accumulate=accumulate, steps_per_call=3)

    assert placed.shape == ((3, 16) if accumulate == 1 else (3, 2, 8))
    np.testing.assert_array_equal(np.asarray(placed).reshape(3, 16), x)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("spread", [False, True])
def test_device_arrays_are_placed_too(spread, accumulate, layout):
    x = jax.device_put(np.arange(16), jax.devices()[3])
    placed = place(place(x, layout) if spread else x, layout, accumulate=accumulate)

    assert placed.sharding.spec == replica_spec(batch_axis(accumulate))
    np.testing.assert_array_equal(np.asarray(placed).ravel(), np.arange(16))


def test_a_device_array_in_its_place_stays_there(layout):
    x = place(np.arange(16), layout)
    with jax.transfer_guard("disallow"):
        placed = place(x, layout)

    pointers = [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    assert pointers == [
        shard.data.unsafe_buffer_pointer() for shard in placed.addressable_shards
    ]


def test_device_arrays_are_stacked_on_their_device(layout):
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
def test_a_batch_that_cannot_be_cut_is_refused(batch, message, layout):
    with pytest.raises(BatchError, match=re.escape(message)):
        place(batch, layout)


@pytest.mark.parametrize(("accumulate", "steps_per_call"), [(1, 1), (4, 1), (4, 2)])
def test_shapes_are_those_of_the_arrays_that_would_be_placed(
    accumulate, steps_per_call, layout
):
    cut = {"accumulate": accumulate, "steps_per_call": steps_per_call}
    rows = {"x": np.ones((2, 32, 3)), "n": np.ones((2, 32), np.int64)}
    rows = rows if steps_per_call > 1 else jax.tree.map(lambda leaf: leaf[0], rows)

    def facts(tree):
        return [(each.shape, each.dtype, each.sharding) for each in tree.values()]

    expected = facts(place(rows, layout, **cut))
    assert facts(placed_shapes(rows, layout, **cut)) == expected
    shapes = jax.eval_shape(lambda: rows)
    assert facts(placed_shapes(shapes, layout, **cut)) == expected
