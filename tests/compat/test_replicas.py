"""Values with a leading device axis: one row on each device, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicator.compat import device_put_replicated, device_put_sharded, jax_utils
from replicator.compat import jax as old_jax
from replicator.errors import ArgumentError


def rows_lie_on_their_devices(array, devices):
    return [shard.device for shard in array.addressable_shards] == list(devices) and {
        shard.data.shape[0] for shard in array.addressable_shards
    } == {1}


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_a_replicated_value_is_one_array_with_a_row_on_each_device(make):
    devices = jax.devices()[:4]
    out = device_put_replicated({"w": make([1.0, 2.0])}, devices)["w"]
    assert out.shape == (4, 2)
    assert rows_lie_on_their_devices(out, devices)
    np.testing.assert_array_equal(out, [[1.0, 2.0]] * 4)


def test_random_keys_are_replicated(key):
    out = jax_utils.replicate(key)
    assert (out.shape, out.dtype) == ((8,), key.dtype)
    assert jax_utils.unreplicate(out) == key


def test_shards_are_put_each_on_its_device():
    devices = jax.devices()
    out = device_put_sharded([{"x": np.full(2, i)} for i in range(8)], devices)["x"]
    assert rows_lie_on_their_devices(out, devices)
    assert out[:, 0].tolist() == list(range(8))


def test_shards_of_other_shapes_or_number_are_refused():
    with pytest.raises(ArgumentError, match="`shards` must be one for each device"):
        device_put_sharded([1.0], jax.devices())
    with pytest.raises(ArgumentError, match="`shards` must agree"):
        device_put_sharded([np.ones(1), np.ones(2)], jax.devices()[:2])


def test_unreplicate_takes_a_row_from_its_device():
    tree = {"w": np.arange(3.0), "n": 2}
    out = jax_utils.unreplicate(jax_utils.replicate(tree))
    np.testing.assert_array_equal(out["w"], tree["w"])
    assert out["n"] == 2
    assert out["w"].devices() == {jax.devices()[0]}


def test_unreplicate_is_row_zero_wherever_the_rows_lie():
    for value in (np.ones((8, 2)), jnp.ones((8, 2)), jnp.ones((16, 2))):
        assert jax_utils.unreplicate(value).shape == (2,)


def test_shard_cuts_a_batch_and_refuses_one_that_does_not_divide():
    assert jax_utils.shard({"x": np.ones((16, 3))})["x"].shape == (8, 2, 3)
    assert jax_utils.shard(np.ones((0, 3))).shape == (8, 0, 3)
    with pytest.raises(ArgumentError, match=r"`xs` must divide evenly over 8 devices"):
        jax_utils.shard(np.ones(12))


def test_prefetched_batches_lie_on_the_devices_in_order():
    batches = ({"x": np.full((8, 2), i)} for i in range(5))
    out = list(jax_utils.prefetch_to_device(batches, 2))
    assert [int(batch["x"][0, 0]) for batch in out] == list(range(5))
    assert rows_lie_on_their_devices(out[0]["x"], jax.devices())


def test_what_the_input_raises_is_raised_where_it_is_read():
    def broken():
        yield np.ones(8)
        raise OSError("a bad sector")

    source = jax_utils.prefetch_to_device(broken(), 2)
    next(source)
    with pytest.raises(OSError, match="a bad sector"):
        next(source)


def test_prefetching_nothing_is_refused():
    with pytest.raises(ArgumentError, match="`size` must be at least 1"):
        jax_utils.prefetch_to_device(iter([]), 0)


@pytest.mark.parametrize("examples", [1, 8, 13])
def test_a_batch_of_any_length_is_padded_and_cut_again(examples):
    compiled = []

    @jax_utils.pad_shard_unpad
    @old_jax.pmap
    def double(w, x):
        compiled.append(x.shape)
        return {"y": w * x}

    w = jax_utils.replicate(np.float32(2))
    x = np.arange(examples, dtype=np.float32)
    np.testing.assert_array_equal(double(w, x, min_device_batch=2)["y"], 2 * x)
    assert compiled == [(2,)]


def test_a_static_result_is_handed_back_as_it_is():
    count = jax_utils.pad_shard_unpad(
        lambda x: x.sum(), static_argnums=(), static_return=True
    )
    assert count(np.ones(13)) == 13


def test_lengths_that_differ_are_refused():
    with pytest.raises(ArgumentError, match=r"one number of examples, got \[2, 3\]"):
        jax_utils.pad_shard_unpad(lambda w, x, y: x)(0, np.ones(2), np.ones(3))


def test_metrics_of_many_steps_are_stacked():
    metrics = [jax_utils.replicate({"loss": np.float32(i)}) for i in range(3)]
    stacked = jax_utils.get_metrics(metrics)["loss"]
    np.testing.assert_array_equal(stacked, [0, 1, 2])


def test_onehot_is_that_of_flax():
    hot = jax_utils.onehot(jnp.array([1, 0]), 3, on_value=0.9, off_value=0.05)
    np.testing.assert_allclose(hot, [[0.05, 0.9, 0.05], [0.9, 0.05, 0.05]], rtol=1e-6)


def test_each_device_gets_a_key_of_its_own(key):
    assert (
        len(
            {
                tuple(k)
                for k in jax.random.key_data(jax_utils.shard_prng_key(key)).tolist()
            }
        )
        == 8
    )


def test_the_old_namespace_has_what_is_gone_and_all_the_rest():
    assert old_jax.tree_map(lambda x: x + 1, {"a": 1}) == {"a": 2}
    assert old_jax.host_id() == 0
    assert old_jax.numpy is jnp
    assert old_jax.random is jax.random
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = old_jax.nothing
