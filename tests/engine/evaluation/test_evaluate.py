import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import replicator
from replicator import Concat, Max, Mean, Min, PerReplica, Sum
from replicator.errors import ArgumentError, BatchError, NonFiniteError
from tests.steps import (
    conv,
    errors,
    image_batch,
    init_conv,
    init_mlp,
    regression_batch,
    replicas,
    trainer,
)

EXAMPLES = 10_007


def cut(batch, size):
    """Cut one big batch into batches of `size`; the last may be smaller."""
    count = len(jax.tree.leaves(batch)[0])
    return [
        jax.tree.map(lambda leaf, i=start: leaf[i : i + size], batch)
        for start in range(0, count, size)
    ]


def mlp_metrics(params, batch):
    losses, mask = errors(params, batch), batch["mask"]
    count = mask.sum()
    safe = jnp.where(count == 0, 1.0, count)
    return {
        "loss": losses,
        "mean": Mean((losses * mask).sum() / safe, count),
        "sum": Sum((losses * mask).sum()),
        "max": Max(losses.max()),
        "count": Sum(count.astype(jnp.int32)),
        "small": losses < 1,
    }


def conv_metrics(params, batch):
    features = jax.nn.relu(conv(params, batch["image"])).mean((1, 2))
    logits = features @ params["head"]
    label = batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return {"loss": losses, "accuracy": logits.argmax(-1) == label, "logits": logits}


NETS = {
    "mlp": (mlp_metrics, init_mlp, regression_batch(EXAMPLES)),
    "conv": (conv_metrics, init_conv, image_batch(EXAMPLES)),
}


@functools.cache
def compiled(net, num_replicas):
    rep = replicas(num_replicas)
    eval_fn, init_params, _ = NETS[net]
    return rep.compile_evaluation(eval_fn), rep.init(init_params)


@functools.cache
def evaluated(net, num_replicas, *, size=256):
    evaluation, state = compiled(net, num_replicas)
    return evaluation(state, cut(NETS[net][2], size))


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("num_replicas", [2, 3, 8])
def test_any_number_of_replicas_gives_the_same_bits(net, num_replicas):
    one, many = evaluated(net, 1), evaluated(net, num_replicas)

    assert one.keys() == many.keys()
    for name in one:
        assert np.asarray(one[name]).tobytes() == np.asarray(many[name]).tobytes(), name


@pytest.mark.parametrize("net", NETS)
def test_every_example_counts_once(net):
    assert evaluated(net, 3)["examples"] == EXAMPLES


def test_the_numbers_are_those_of_numpy():
    params = jax.device_get(replicas(1).init(init_mlp))
    data = NETS["mlp"][2]
    hidden = np.tanh(data["x"] @ params["w1"] + params["b1"])
    losses = (hidden @ params["w2"] - data["y"]).astype(np.float64) ** 2
    found = evaluated("mlp", 8)

    # float32 of the network; sums over examples are exact to float64.
    for name in ("loss", "mean"):
        np.testing.assert_allclose(found[name], losses.mean(), rtol=1e-6)
    np.testing.assert_allclose(found["sum"], losses.sum(), rtol=1e-6)
    np.testing.assert_allclose(found["max"], losses.max(), rtol=1e-5)
    assert found["count"] == EXAMPLES
    assert found["small"] == (losses < 1).mean()


def test_the_types_are_plain():
    kinds = {name: type(value) for name, value in evaluated("mlp", 3).items()}

    assert kinds == {
        **dict.fromkeys(["loss", "mean", "sum", "max", "small"], float),
        **dict.fromkeys(["count", "examples"], int),
    }
    assert evaluated("conv", 3)["logits"].shape == (3,)


@pytest.mark.parametrize("size", [1000, 10_007])
def test_bits_do_not_depend_on_how_the_dataset_is_batched(size):
    assert evaluated("mlp", 8, size=size) == evaluated("mlp", 8)


def numbers(count):
    return {"x": np.arange(1, count + 1, dtype=np.int32)}


def total(state, batch):
    counted = batch["x"] * batch["mask"].astype(jnp.int32)
    return {"total": Sum(counted.sum()), "mean": batch["x"], "max": Max(counted.max())}


@pytest.mark.parametrize("num_replicas", [1, 3, 8])
def test_datasets_of_all_sizes_are_counted(num_replicas):
    evaluation = replicas(num_replicas).compile_evaluation(total, block=8)
    for count in (1, 2, 7, 8, 9, 31, 32, 33, 95, 96, 97, 256, 257, 1000):
        found = evaluation({}, cut(numbers(count), 100))

        assert found == {
            "examples": count,
            "total": count * (count + 1) // 2,
            "mean": (count + 1) / 2,
            "max": count,
        }


def test_evaluating_again_traces_nothing_anew():
    traced = []

    def eval_fn(state, batch):
        traced.append(batch["x"].shape)
        return {"x": batch["x"] * state}

    rep = replicas(2)
    for count in (3, 300):
        rep.evaluate(eval_fn, [numbers(count)], state=np.int32(2), block=8)
    assert traced == [(8,), (16,)]  # the program, and what the door looks at


def test_the_state_is_neither_changed_nor_donated():
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    data = [regression_batch()]
    state = rep.run(step_fn, data, init_fn=init_fn, steps=2, display=False).state
    before = jax.device_get(state["params"])
    rep.evaluate(lambda s, b: {"loss": errors(s["params"], b)}, data, state=state)

    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state["params"]), before)


def test_each_replica_meets_its_own_leaves():
    rep = replicas(2)
    state = rep.init(lambda key: {"own": PerReplica(jnp.zeros(()))})
    rows = jax.device_put(np.float32([1, 10]), state["own"].value.sharding)
    state = {"own": PerReplica(rows)}
    found = rep.evaluate(
        lambda s, b: {"own": PerReplica(s["own"].value), "x": b["x"] * s["own"].value},
        [{"x": np.ones(12, np.float32)}],
        state=state,
        block=2,
    )

    np.testing.assert_array_equal(found["own"], [1, 10])
    assert found["x"] == (8 * 1 + 4 * 10) / 12


def test_a_replica_without_examples_has_no_mean_of_its_own():
    def eval_fn(state, batch):
        return {"mean": PerReplica((batch["x"] * batch["mask"]).sum())}

    found = replicas(2).evaluate(eval_fn, [{"x": np.ones(3, np.float32)}], state={})

    np.testing.assert_array_equal(found["mean"], [3, np.nan])


def test_leaves_of_another_number_of_replicas_are_refused():
    state = replicas(4).init(lambda key: {"own": PerReplica(jnp.zeros(()))})
    message = (
        "`state` must hold a leading axis of 2 replicas at `own`, a `PerReplica` leaf, "
        "got float32[4]. Give each replica its row, or make the state with "
        "`rep.init(init_fn)`."
    )

    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        replicas(2).evaluate(total, [numbers(3)], state=state)


def test_a_state_of_another_replicator_is_taken():
    state = replicas(8).init(init_mlp)
    found = replicas(3).evaluate(mlp_metrics, [regression_batch(10)], state=state)

    assert found["examples"] == 10


def test_a_module_that_keeps_statistics_is_the_same_for_every_block():
    def init_fn(key):
        return nnx.BatchNorm(1, use_running_average=False, rngs=nnx.Rngs(key))

    def eval_fn(norm, batch):
        norm(batch["x"][:, None])
        return {"mean": jnp.broadcast_to(norm.mean[...], batch["mask"].shape)}

    rep = replicas(2)
    norm = rep.init(init_fn)
    rows = {"x": np.ones(64, np.float32)}
    found = rep.evaluate(eval_fn, [rows], state=norm, block=4)

    np.testing.assert_allclose(found["mean"], 0.01, rtol=1e-6)
    assert norm.mean[...] == 0


def test_batches_that_are_no_dicts_need_no_mask():
    data = [(np.arange(5, dtype=np.float32),), (np.arange(5, 8, dtype=np.float32),)]
    found = replicas(3).evaluate(lambda s, b: {"x": b[0]}, data, state={})

    assert found == {"x": 3.5, "examples": 8}


def test_rows_count_what_the_datasets_own_mask_says():
    data = [{"x": np.float32([1, 5, 100]), "mask": np.array([True, True, False])}]
    found = replicas(2).evaluate(lambda s, b: {"x": b["x"]}, data, state={})

    assert found == {"x": 3.0, "examples": 3}


def test_a_mask_by_token_weights_tokens_and_padding_weighs_nothing():
    def eval_fn(state, batch):
        tokens = batch["mask"].sum()
        mean = (batch["x"] * batch["mask"]).sum() / jnp.maximum(tokens, 1)
        return {"by_token": Mean(mean, tokens), "by_row": batch["x"].sum(1)}

    own = np.float32([[1, 0], [1, 1], [1, 1]])
    data = [{"x": np.float32([[1, 9], [2, 3], [4, 5]]), "mask": own}]
    found = replicas(2).evaluate(eval_fn, data, state={}, block=2)

    assert found == {"by_token": 15 / 5, "by_row": 24 / 3, "examples": 3}


def test_what_weighs_nothing_may_be_nan():
    def eval_fn(state, batch):
        weight = (batch["x"] * batch["mask"]).sum()
        return {"mean": Mean(weight / weight, weight)}

    data = [{"x": np.float32([0, 0, 1, 1, 1])}]
    found = replicas(2).evaluate(eval_fn, data, state={}, block=2)

    assert found["mean"] == 1


def test_a_matrix_of_counts_is_a_metric():
    def eval_fn(state, batch):
        rows = jax.nn.one_hot(batch["label"], 3) * batch["mask"][:, None]
        return {"confusion": Sum(rows.T @ rows)}

    data = cut({"label": np.arange(10, dtype=np.int32) % 3}, 4)
    found = replicas(3).evaluate(eval_fn, data, state={}, block=3)

    np.testing.assert_array_equal(found["confusion"], np.diag([4, 3, 3]))


def test_an_axis_as_long_as_a_block_is_not_taken_for_examples():
    def eval_fn(state, batch):
        return {"classes": jnp.zeros(8) + batch["mask"].sum()}

    with pytest.raises(ArgumentError, match=r"got float32\[8\] for `classes`"):
        replicas(2).evaluate(eval_fn, [numbers(3)], state={}, block=8)


def test_what_the_second_trace_raises_says_why_it_was_traced():
    def eval_fn(state, batch):
        return {"x": batch["x"] + jnp.zeros(8, jnp.int32)}

    with pytest.raises(TypeError) as caught:
        replicas(2).evaluate(eval_fn, [numbers(3)], state={}, block=8)
    assert caught.value.__notes__[-1] == (
        "`eval_fn` was traced with 16 examples, after 8, to see which results have one "
        "row per example."
    )


MASK_UNUSED = (
    '`eval_fn` must weight `x`, a `{}`, by `batch["mask"]`, which is 0 for padding, '
    "got no use of it. Multiply by it, or return one row per example."
)
REFUSED = {
    "plain mean": (
        lambda s, b: {"x": b["x"].sum()},
        "`eval_fn` must return one row per example for a plain metric, got int32[] for "
        "`x`. Leave the mean over examples to the evaluation, or declare it: "
        "`Mean(value, weight)`, `Sum` or `Max`.",
    ),
    "mean without weight": (
        lambda s, b: {"x": Mean(b["mask"].mean())},
        "`eval_fn` must give `x`, a `Mean`, a scalar weight, got None. Pass the number "
        'of its examples: `Mean(value, batch["mask"].sum())`.',
    ),
    "mean of padding": (
        lambda s, b: {"x": Mean(b["x"].sum(), b["mask"].sum())},
        MASK_UNUSED.format("Mean"),
    ),
    "weight of padding": (
        lambda s, b: {"x": Mean((b["x"] * b["mask"].astype(jnp.int32)).sum(), 8.0)},
        MASK_UNUSED.format("Mean"),
    ),
    "sum of padding": (
        lambda s, b: {"x": Sum(b["x"].sum())},
        MASK_UNUSED.format("Sum"),
    ),
    "own mean of padding": (
        lambda s, b: {"x": PerReplica(b["x"].sum())},
        MASK_UNUSED.format("PerReplica"),
    ),
    "rows declared": (
        lambda s, b: {"x": Sum(b["x"] * b["mask"].astype(jnp.int32))},
        "`eval_fn` must reduce `x`, a `Sum`, over its examples, got int32[8]. Return "
        "the array itself for its mean over examples.",
    ),
    "rows that are none": (
        lambda s, b: {"x": Concat(b["x"].sum())},
        "`eval_fn` must return one row per example for `x`, a `Concat`, got int32[]. "
        "Leave examples in the first axis, or declare it otherwise.",
    ),
    "no dict": (
        lambda s, b: (s, {"x": b["x"]}),
        "`eval_fn` must return a dict of metrics, got `tuple`. Return them alone, each "
        "under its name.",
    ),
    "taken name": (
        lambda s, b: {"examples": b["x"]},
        "`eval_fn` must leave the name `examples` to the count of examples, got a "
        "metric of that name. Rename it.",
    ),
}


@pytest.mark.parametrize(("eval_fn", "message"), REFUSED.values(), ids=REFUSED)
def test_what_could_not_be_exact_is_refused(eval_fn, message):
    # Eight examples are a whole block: refused also where none is padded.
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
        replicas(2).evaluate(eval_fn, [numbers(8)], state={}, block=8)


def test_a_mean_of_the_state_alone_needs_no_mask():
    def eval_fn(state, batch):
        return {"rate": Mean(state, batch["mask"].sum())}

    found = replicas(2).evaluate(eval_fn, [numbers(9)], state=np.float32(0.5))

    assert found == {"rate": 0.5, "examples": 9}


def test_collectives_are_refused_with_their_line():
    def eval_fn(state, batch):
        return {"x": replicator.all_reduce(batch["x"].sum(), op="sum") + batch["x"]}

    with pytest.raises(ArgumentError, match=r"got `psum\w*` at .*test_evaluate\.py:"):
        replicas(2).evaluate(eval_fn, [numbers(3)], state={})


def test_a_bad_dataset_is_refused():
    rep = replicas(2)
    with pytest.raises(BatchError, match="must yield at least one batch, got none"):
        rep.evaluate(total, [], state={})
    with pytest.raises(NonFiniteError, match=r"`x`, example 1 \(batch 0\)"):
        rep.evaluate(total, [{"x": np.float32([0, np.nan])}], state={})


def test_a_block_has_an_example():
    with pytest.raises(ArgumentError, match="`block` must be at least 1, got 0"):
        replicas(1).compile_evaluation(total, block=0)


def test_a_scan_of_the_users_own_is_followed_to_the_mask():
    def eval_fn(state, batch):
        masked = batch["x"] * batch["mask"].astype(jnp.int32)
        return {"x": Sum(lax.scan(lambda c, x: (c + x, None), 0, masked)[0])}

    found = replicas(2).evaluate(eval_fn, [numbers(5)], state={})

    assert found == {"x": 15, "examples": 5}


@pytest.mark.parametrize("num_replicas", [1, 3, 8])
def test_rows_and_extremes_are_those_of_the_dataset(num_replicas):
    def eval_fn(state, batch):
        x = batch["x"]
        rows = {"x": Concat(x), "pair": Concat(jnp.stack([x, -x], 1).astype("float16"))}
        return {**rows, "min": Min(x.min()), "flag": Min((x > 0).all())}

    evaluation = replicas(num_replicas).compile_evaluation(eval_fn, block=4)
    for count in (1, 15, 16, 97):
        x = np.arange(1, count + 1)
        found = evaluation({}, cut(numbers(count), 10))
        np.testing.assert_array_equal(found["x"], x)
        np.testing.assert_array_equal(found["pair"], np.stack([x, -x], 1))
        assert (found["min"], found["flag"]) == (1, 1)
        assert (found["x"].dtype, found["pair"].dtype) == (np.int32, np.float16)


def test_totals_of_half_precision_and_of_small_counts_do_not_overflow():
    def eval_fn(state, batch):
        mask = batch["mask"]
        tokens = (mask * 60_000).sum()
        value = jnp.asarray(60_000, jnp.float16)
        return {
            "mean": Mean(value, tokens),
            "sum": Sum(value * mask.max().astype("float16")),
            "count": Sum(mask.max().astype(jnp.int8) * 100),
        }

    found = replicas(2).evaluate(eval_fn, [numbers(64)], state={}, block=1)
    expected = {"mean": 60_000, "sum": 64 * 60_000, "count": 6_400, "examples": 64}
    assert found == expected
