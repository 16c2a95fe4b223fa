"""`rep.predict`: one row per example, in order, on any number of replicas."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicator
from replicator import PerReplica
from replicator.errors import ArgumentError, BatchError
from tests.engine.evaluation.test_evaluate import cut, numbers
from tests.steps import init_mlp, mlp, regression_batch, replicas

EXAMPLES = 1_003
DATA = regression_batch(EXAMPLES)


def outputs(params, batch):
    y = mlp(params, batch["x"])
    return {
        "y": y,
        "pair": (jnp.stack([y, -y], 1), y > 0),
        "half": y.astype("bfloat16"),
    }


@functools.cache
def predicted(num_replicas, size=100):
    rep = replicas(num_replicas)
    return rep.predict(outputs, cut(DATA, size), rep.init(init_mlp), block=16)


def test_rows_are_those_of_numpy_in_order():
    params = jax.device_get(replicas(1).init(init_mlp))
    found = predicted(8)
    y = np.tanh(DATA["x"] @ params["w1"] + params["b1"]) @ params["w2"]
    np.testing.assert_allclose(found["y"], y, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(
        found["pair"][0], np.stack([found["y"], -found["y"]], 1)
    )
    np.testing.assert_array_equal(found["pair"][1], found["y"] > 0)


def test_leaves_are_arrays_of_numpy_in_their_own_dtypes():
    found = predicted(3)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(found))
    assert [str(leaf.dtype) for leaf in jax.tree.leaves(found)] == [
        "bfloat16",
        "float32",
        "bool",
        "float32",
    ]


@pytest.mark.parametrize(("num_replicas", "size"), [(2, 100), (3, 7), (8, EXAMPLES)])
def test_bits_depend_neither_on_replicas_nor_on_batches(num_replicas, size):
    one, many = predicted(1), predicted(num_replicas, size)
    assert jax.tree.structure(one) == jax.tree.structure(many)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("num_replicas", [1, 3, 8])
def test_datasets_of_all_sizes_are_predicted(num_replicas):
    rep = replicas(num_replicas)

    def double(state, batch):
        return batch["x"] * 2

    for count in (1, 7, 8, 9, 31, 32, 33, 95, 97, 257):
        found = rep.predict(double, cut(numbers(count), 100), {}, block=8)
        np.testing.assert_array_equal(found, 2 * np.arange(1, count + 1))


def test_the_function_gets_the_batch_as_the_dataset_has_it():
    seen = []

    def predict_fn(state, batch):
        seen.append(jax.tree.structure(batch))
        return batch["mask"]

    own = np.arange(6, dtype=np.float32)
    found = replicas(2).predict(predict_fn, [{"x": own, "mask": own}], {})
    np.testing.assert_array_equal(found, own)
    assert set(seen) == {jax.tree.structure({"x": 0, "mask": 0})}


def test_batches_may_be_plain_arrays():
    found = replicas(2).predict(lambda s, b: b + s, [np.arange(5.0)], np.float32(1))
    np.testing.assert_array_equal(found, np.arange(1.0, 6.0))


def test_predicting_again_traces_nothing_anew():
    traced = []

    def predict_fn(state, batch):
        traced.append(len(batch["x"]))
        return batch["x"]

    rep = replicas(2)
    for count in (3, 300):
        rep.predict(predict_fn, [numbers(count)], {}, block=8)
    assert traced == [8, 16]


def test_each_replica_meets_its_own_leaves():
    rep = replicas(2)
    state = rep.init(lambda key: {"own": PerReplica(jnp.zeros(()))})
    rows = jax.device_put(np.float32([1, 10]), state["own"].value.sharding)

    def predict_fn(state, batch):
        return batch["x"] * state["own"].value

    data = [{"x": np.ones(12, np.float32)}]
    found = rep.predict(predict_fn, data, {"own": PerReplica(rows)}, block=2)
    assert found.tolist() == [1] * 8 + [10] * 4


NO_ROWS = (
    "`predict_fn` must return one row per example, got {}. Leave examples in the first "
    "axis; for sums and means use `evaluate`."
)
REFUSED = {
    "scalar": (lambda s, b: b["x"].sum(), NO_ROWS.format("int32[]")),
    "vector as long": (
        lambda s, b: {"x": b["x"], "y": jnp.zeros(8)},
        NO_ROWS.format("float32[8] for `y`"),
    ),
    "another axis": (
        lambda s, b: {"y": b["x"][None]},
        NO_ROWS.format("int32[1,8] for `y`"),
    ),
    "nothing": (lambda s, b: {}, NO_ROWS.format("nothing")),
}


@pytest.mark.parametrize(("predict_fn", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_row_per_example_is_refused(predict_fn, message):
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
        replicas(2).predict(predict_fn, [numbers(8)], {}, block=8)


def test_collectives_are_refused_with_their_line():
    def predict_fn(state, batch):
        return batch["x"] - replicator.all_reduce(batch["x"], op="sum")

    message = r"must not call collectives, got `psum\w*` at .*test_predict\.py:"
    with pytest.raises(ArgumentError, match=message):
        replicas(2).predict(predict_fn, [numbers(3)], {})


def test_bad_arguments_are_refused():
    rep = replicas(2)
    with pytest.raises(
        ArgumentError, match="`predict_fn` must be a function, got dict"
    ):
        rep.predict({}, [numbers(3)], {})
    with pytest.raises(ArgumentError, match="`block` must be at least 1, got 0"):
        rep.predict(outputs, [numbers(3)], {}, block=0)
    with pytest.raises(BatchError, match="must yield at least one batch, got none"):
        rep.predict(outputs, [], {})
