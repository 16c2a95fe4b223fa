"""A metric has the same value, dtype and shape for any replicas and microbatches."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator import Concat, Max, Mean, Min, PerReplica, Sum, strategies
from replicator.errors import ArgumentError
from tests.steps import assert_equal_bits, regression_batch, replicas, trainer

EXAMPLES = 32
CUTS = [(1, 1), (2, 2), (4, 1), (8, 4)]
FLOATS = ["float16", "bfloat16", "float32"]
COUNTS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32"]
X = np.random.default_rng(0).integers(0, 2, (EXAMPLES, 3)).astype(np.float32)
TOKENS = np.arange(1, EXAMPLES + 1, dtype=np.float32) * 1_000  # 528,000 of them

every_cut = pytest.mark.parametrize(("num_replicas", "accumulate"), CUTS)


def per_token(values, tokens):
    """Return the mean by tokens of a microbatch, and how many those are."""
    return Mean((values * tokens).sum() / tokens.sum(), tokens.sum())


def kinds(batch):
    """Report every kind of metric in every dtype; rows are [examples, 3]."""
    found = {}
    for dtype in [*FLOATS, *COUNTS]:
        rows = batch["x"].astype(dtype)
        large = (batch["x"][:, 0] * 100 + 20).astype(dtype)
        found[dtype] = {
            "mean": Mean(large.astype(jnp.float32).mean().astype(dtype)),
            "sum": Sum(large.max()),
            "max": Max(large.max()),
            "min": Min(large.min()),
            "concat": Concat(rows),
            "own rows": PerReplica(rows),
            "own last": PerReplica(rows[-1, 0]),
        }
    for dtype in FLOATS:
        mean = per_token(batch["x"][:, 1] * 1_000, batch["tokens"])
        found[dtype]["by token"] = Mean(mean.value.astype(dtype), mean.weight)
    return found


def reported(metrics_of, num_replicas, accumulate, batch=None):
    """Return what one update reports of a batch, on the host."""
    rep = replicas(num_replicas)
    init_fn, train = trainer(
        rep.wrap_optimizer(optax.sgd(0.1)),
        lambda params, batch: (params["w"] * batch["x"]).mean(),
        lambda key: {"w": jnp.ones((1, 3))},
    )

    def step_fn(state, batch):
        after, _ = train(state, batch)
        return after, metrics_of(batch)

    step = rep.compile(step_fn, accumulate=accumulate)
    batch = batch or {"x": X, "tokens": TOKENS}
    return jax.device_get(step(rep.init(init_fn), batch)[1])


@functools.cache
def of_all_kinds(num_replicas, accumulate):
    return reported(kinds, num_replicas, accumulate)


def blocks(array, num_replicas, accumulate):
    """Cut an array into [microbatch, replica, examples, ...], in example order."""
    return array.reshape(accumulate, num_replicas, -1, *array.shape[1:])


@every_cut
def test_dtypes_and_shapes_are_those_of_one_replica(num_replicas, accumulate):
    one = jax.tree.map(lambda x: x.dtype, of_all_kinds(1, 1))
    assert (
        jax.tree.map(lambda x: x.dtype, of_all_kinds(num_replicas, accumulate)) == one
    )
    shapes = jax.tree.map(np.shape, of_all_kinds(num_replicas, accumulate))
    for dtype in FLOATS:
        assert shapes[dtype]["concat"] == (EXAMPLES, 3)
        assert shapes[dtype]["own rows"] == (num_replicas, EXAMPLES // num_replicas, 3)
        assert shapes[dtype]["own last"] == (num_replicas,)


def test_counts_are_int32_sums_float32_and_all_others_as_they_came():
    found = jax.tree.map(lambda x: str(x.dtype), of_all_kinds(8, 4))
    for dtype in [*FLOATS, *COUNTS]:
        kept = {"uint32": "uint32"}.get(dtype, "int32")
        assert found[dtype].pop("sum") == ("float32" if dtype in FLOATS else kept)
        assert found[dtype].pop("mean") == (dtype if dtype in FLOATS else "float32")
        assert set(found[dtype].values()) == {dtype}


@every_cut
@pytest.mark.parametrize("dtype", [*FLOATS, *COUNTS])
def test_sums_neither_wrap_nor_round(num_replicas, accumulate, dtype):
    large = (X[:, 0] * 100 + 20).astype(np.float32)
    if dtype == "bool":
        large = large.astype(bool).astype(np.float32)
    cut = blocks(large, num_replicas, accumulate)
    found = of_all_kinds(num_replicas, accumulate)[dtype]
    assert found["sum"] == cut.max(-1).sum()
    assert (found["max"], found["min"]) == (large.max(), large.min())
    if dtype in FLOATS:  # rounded for each microbatch, each replica, and the result
        np.testing.assert_allclose(np.float32(found["mean"]), large.mean(), rtol=1e-2)


@every_cut
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_mean_by_tokens_is_that_of_one_batch(num_replicas, accumulate, dtype):
    found = of_all_kinds(num_replicas, accumulate)[dtype]["by token"]
    expected = np.average(X[:, 1] * 1_000, weights=TOKENS)
    tolerance = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(np.float32(found), expected, rtol=tolerance)


@every_cut
@pytest.mark.parametrize("dtype", [*FLOATS, *COUNTS])
def test_rows_are_those_of_the_global_batch_in_order(num_replicas, accumulate, dtype):
    found = of_all_kinds(num_replicas, accumulate)[dtype]["concat"]
    np.testing.assert_array_equal(found, X.astype(found.dtype))


@every_cut
@pytest.mark.parametrize("dtype", [*FLOATS, *COUNTS])
def test_own_rows_are_those_of_each_replica(num_replicas, accumulate, dtype):
    found = of_all_kinds(num_replicas, accumulate)[dtype]
    own = blocks(X, num_replicas, accumulate).swapaxes(0, 1)
    rows = own.reshape(num_replicas, -1, 3).astype(found["own rows"].dtype)
    np.testing.assert_array_equal(found["own rows"], rows)


@every_cut
def test_own_numbers_are_averaged_and_own_counts_those_of_the_last(
    num_replicas, accumulate
):
    found = of_all_kinds(num_replicas, accumulate)
    last = blocks(X, num_replicas, accumulate)[:, :, -1, 0]
    for dtype in FLOATS:
        np.testing.assert_allclose(np.float32(found[dtype]["own last"]), last.mean(0))
    for dtype in COUNTS:
        np.testing.assert_array_equal(found[dtype]["own last"], last[-1])


def test_own_vectors_as_long_as_a_microbatch_are_not_taken_for_rows():
    def metrics_of(batch):
        fixed = batch["x"][:1, :1] + jnp.arange(4.0)
        return {"fixed": PerReplica(fixed[0]), "rows": PerReplica(batch["x"][:, 0])}

    with jax.numpy_rank_promotion("allow"):
        found = reported(metrics_of, 2, 4)  # four examples in a microbatch
    assert found["fixed"].shape == (2, 4)
    assert found["rows"].shape == (2, 16)


def test_rows_of_one_number_each_and_of_nested_trees_are_joined():
    def metrics_of(batch):
        rows = {"a": batch["x"][:, 0], "b": (batch["x"] > 0,)}
        return {"all": jax.tree.map(Concat, rows), "own": PerReplica(rows)}

    found = reported(metrics_of, 2, 2)
    np.testing.assert_array_equal(found["all"]["a"], X[:, 0])
    np.testing.assert_array_equal(found["all"]["b"][0], X > 0)
    assert found["own"]["b"][0].dtype == bool


def test_rows_do_not_depend_on_how_gradients_are_reduced():
    rep = replicas(4, reduction="ordered")
    init_fn, train = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    batch = {"x": np.ones((16, 4), np.float32), "y": np.arange(16, dtype=np.float32)}

    def step_fn(state, batch):
        return train(state, batch)[0], {"y": Concat(batch["y"]), "least": Min(-1.0)}

    for accumulate in (1, 2):
        step = rep.compile(step_fn, accumulate=accumulate)
        _, found = step(rep.init(init_fn), batch)
        np.testing.assert_array_equal(found["y"], batch["y"])
        assert found["least"] == -1


def test_rows_of_several_steps_in_a_call_are_apart():
    rep = replicas(2)
    step = rep.compile(lambda s, b: (s, {"x": Concat(b["x"])}), steps_per_call=3)
    batches = np.arange(12, dtype=np.int32).reshape(3, 4)
    _, found = step({"w": jnp.ones(())}, {"x": batches})
    np.testing.assert_array_equal(found["x"], batches)


def test_debugging_reports_the_rows_too():
    step = replicas(2).compile(lambda s, b: (s, {"x": Concat(b["x"])}), debug=True)
    _, found = step({"w": jnp.ones(())}, {"x": X})
    np.testing.assert_array_equal(found["x"], X)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_what_has_no_row_per_example_is_refused(accumulate):
    def metrics_of(batch):
        return {"a": Concat(batch["x"].sum(0)), "b": 1.0}

    message = (
        r"^`step_fn` must report one row per example for `a`, a `Concat`, got "
        r"float32\[3\] for \d+ examples\. Declare it as `Mean`, `Sum`, `Max` or "
        r"`Min`\."
    )
    with pytest.raises(ArgumentError, match=message):
        reported(metrics_of, 2, accumulate)


def test_rows_that_follow_from_the_update_alone_are_refused_under_accumulation():
    rep = replicas(2)
    init_fn, train = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    batch = {"x": np.ones((16, 4), np.float32), "y": np.ones(16, np.float32)}

    def step_fn(state, batch):
        after, _ = train(state, batch)
        rows = jnp.broadcast_to(after["params"]["w2"].sum(), len(batch["x"]))
        return after, {"a": Concat(rows)}

    assert rep.compile(step_fn)(rep.init(init_fn), batch)[1]["a"].shape == (16,)
    with pytest.raises(ArgumentError, match=r"got float32\[4\] for 8 examples"):
        rep.compile(step_fn, accumulate=2)(rep.init(init_fn), batch)


def test_own_rows_along_another_axis_are_refused_under_accumulation():
    message = (
        r"^`step_fn` must report `a`, a `PerReplica`, in one shape or with one row per "
        r"example, got float32\[3,4\] of a microbatch and float32\[3,16\] of the whole "
        r"batch\. Put the axis of examples first\."
    )
    with pytest.raises(ArgumentError, match=message):
        reported(lambda batch: {"a": PerReplica(batch["x"].T)}, 2, 4)


def test_what_the_trace_of_the_whole_batch_raises_says_why_it_was_traced():
    def metrics_of(batch):
        return {"a": PerReplica(batch["x"].reshape(4, 3))}

    with pytest.raises(TypeError) as caught:
        reported(metrics_of, 2, 4)
    note = (
        "`step_fn` was traced with the 16 examples of a replica at once, to see which "
        "metrics have one row per example."
    )
    assert note in caught.value.__notes__


def test_a_run_takes_all_kinds_and_goes_on_with_them(tmp_path):
    rep = replicas(2)
    init_fn, train = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
    batch = {"x": x, "y": x[:, 0]}

    def step_fn(state, batch):
        y = batch["y"]
        kept = {"y": Concat(y), "half": Concat(y.astype("bfloat16"))}
        own = PerReplica({"n": jnp.asarray(len(y)), "up": y > 0})
        return train(state, batch)[0], {**kept, "least": Min(y.min()), "own": own}

    for steps in (2, 4):
        found = rep.run(
            step_fn,
            [batch],
            init_fn=init_fn,
            steps=steps,
            accumulate=2,
            directory=tmp_path,
            checkpoint_dir=tmp_path / "checkpoints",
            write_every=1,
            display=False,
        )
    np.testing.assert_array_equal(found.metrics["y"], x[:, 0])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert (row["least"], row["y/15"], row["own/n/1"]) == (-1, float(x[15, 0]), 4)


ROWS = {
    "plain": lambda rows: rows,
    "mean": Mean,
    "by tokens": lambda rows: Mean(rows, rows.sum()),
    "sum": Sum,
    "largest": Max,
}


@pytest.mark.parametrize(("num_replicas", "accumulate"), [(2, 1), (1, 2), (8, 4)])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_would_be_merged_with_those_of_others_are_refused(
    kind, num_replicas, accumulate
):
    with pytest.raises(ArgumentError, match=r"reduce `loss` over .* `Concat"):
        reported(
            lambda batch: {"loss": ROWS[kind](batch["x"][:, 0])},
            num_replicas,
            accumulate,
        )


def test_rows_of_one_replica_are_those_of_the_batch():
    found = reported(lambda batch: {"loss": batch["x"][:, 0]}, 1, 1)
    np.testing.assert_array_equal(found["loss"], X[:, 0])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_rows_under_a_strategy_are_refused_with_microbatches_alone(accumulate):
    rep = replicas(4, strategy=strategies.fsdp())
    init_fn, train = trainer(rep.wrap_optimizer(optax.sgd(0.1)))

    def step_fn(state, batch):
        return train(state, batch)[0], {"y": batch["y"]}

    step, batch = rep.compile(step_fn, accumulate=accumulate), regression_batch()
    if accumulate == 1:
        assert_equal_bits(step(rep.init(init_fn), batch)[1]["y"], batch["y"])
    else:
        with pytest.raises(ArgumentError, match="reduce `y` over"):
            step(rep.init(init_fn), batch)


@every_cut
def test_vectors_as_long_as_a_microbatch_are_means(num_replicas, accumulate):
    length = EXAMPLES // (num_replicas * accumulate)

    def by_class(batch):
        return {"by class": batch["x"].mean() * jnp.arange(length, dtype=jnp.float32)}

    found = reported(by_class, num_replicas, accumulate)["by class"]
    np.testing.assert_allclose(found, X.mean() * np.arange(length), rtol=1e-6)


def test_a_vector_that_twice_the_batch_cannot_be_traced_for_says_so():
    def fixed(batch):
        return {"by class": batch["x"].reshape(4, 3)[:, 0] * 0}

    with pytest.raises(TypeError) as failure:
        reported(fixed, 8, 1)
    assert "traced with twice the examples" in failure.value.__notes__[0]
