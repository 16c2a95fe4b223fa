"""What a user gets from `rep.compile`: one call, one batch, one update."""

import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import checkify

import replicator
from replicator import Max, Mean, PerReplica, RecompilationWarning, Sum
from replicator.errors import ArgumentError, BatchError, ReplicationError
from tests.steps import (
    adam,
    apply,
    assert_close,
    assert_equal_bits,
    dropout_trainer,
    gan_trainer,
    mlp_loss,
    params_after,
    regression_batch,
    replicas,
    trainer,
)

MOMENTUM = optax.sgd(0.1, momentum=0.9)


def momentum_step(n, tx=None, **options):
    """Return a compiled MLP step on n replicas, and its first state."""
    rep = replicas(n)
    init_fn, step_fn = trainer(rep.wrap_optimizer(tx or MOMENTUM))
    return rep.compile(step_fn, **options), rep.init(init_fn)


def counting_step(state, batch):
    seen = state["seen"].value + batch["x"].sum()
    return {"seen": PerReplica(seen)}, {
        "mean": batch["x"].mean(),
        "sum": Sum(batch["x"].sum()),
        "own": PerReplica(batch["x"].sum()),
    }


def init_counting(key):
    return {"seen": PerReplica(jnp.zeros(()))}


def test_eight_replicas_equal_one_big_batch():
    batch = regression_batch()
    eight, one = (params_after(*momentum_step(n), batch, steps=3) for n in (8, 1))
    assert_close(eight, one)


def test_one_device_equals_plain_jax():
    tx, batch = MOMENTUM, regression_batch()
    step, state = momentum_step(1)
    params = jax.device_get(state["params"])
    grads = jax.grad(mlp_loss)(params, batch)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert_close(params_after(step, state, batch), optax.apply_updates(params, updates))


def test_one_call_makes_one_update():
    step, state = momentum_step(8, adam())
    for _ in range(3):
        state, _ = step(state, regression_batch())
    assert int(state["opt"].inner[0].count) == 3


def test_the_state_is_donated():
    step, state = momentum_step(8)
    step(state, regression_batch())
    used = jax.tree.leaves((state["params"], state["opt"].inner))
    assert all(leaf.is_deleted() for leaf in used)


def test_the_state_comes_back_whole_on_every_device():
    step, state = momentum_step(8)
    after, metrics = step(state, regression_batch())
    leaves = jax.tree.leaves((after, metrics))
    assert all(leaf.sharding.is_fully_replicated for leaf in leaves)
    assert all(len(leaf.devices()) == 8 for leaf in leaves)


@pytest.mark.parametrize("n", [1, 8])
def test_declared_state_and_metrics_have_a_leading_replica_axis(n):
    rep = replicas(n)
    step = rep.compile(counting_step)
    batch = {"x": np.arange(16, dtype=np.float32)}
    state, _ = step(rep.init(init_counting), batch)
    state, metrics = step(state, batch)
    own = batch["x"].reshape(n, -1).sum(1)
    np.testing.assert_array_equal(state["seen"].value, 2 * own)
    np.testing.assert_array_equal(metrics["own"], own)
    assert float(metrics["sum"]) == 120
    assert float(metrics["mean"]) == 7.5


def test_metric_types_do_not_depend_on_the_number_of_replicas():
    def step_fn(state, batch):
        x = batch["x"]
        return state, {
            "weighted": Mean(x.mean(), x.sum()),
            "sum": Sum(x.sum()),
            "max": Max(x.max()),
            "vector": Mean(jnp.stack([x.mean(), x.max()])),
            "count": jnp.asarray(3, jnp.int32),
            "python": 1.5,
            "own": PerReplica(x[0]),
        }

    def kinds(n):
        step = replicas(n).compile(step_fn)
        _, metrics = step({"a": jnp.ones(())}, {"x": np.ones(16, np.float32)})
        return jax.tree.map(lambda leaf: (type(leaf), leaf.dtype, leaf.ndim), metrics)

    assert kinds(1) == kinds(8)


@pytest.mark.parametrize("n", [1, 2, 8])
def test_steps_per_call_changes_no_bit(n):
    rep = replicas(n)
    init_fn, step_fn = dropout_trainer(rep.wrap_optimizer(adam()))
    batches = [regression_batch(seed=seed) for seed in range(4)]
    keys = jax.random.split(jax.random.key(7), 4)

    single, state, losses = rep.compile(step_fn), rep.init(init_fn), []
    for batch, key in zip(batches, keys, strict=True):
        state, metrics = single(state, batch, key)
        losses.append(metrics["loss"])

    stacked = jax.tree.map(lambda *rows: np.stack(rows), *batches)
    four = rep.compile(step_fn, steps_per_call=4)
    after, metrics = four(rep.init(init_fn), stacked, keys)
    assert_equal_bits(after, state)
    assert_equal_bits(metrics["loss"], np.stack(losses))


def test_steps_per_call_with_accumulation_changes_no_bit():
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(MOMENTUM))
    batches = [regression_batch(seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *rows: np.stack(rows), *batches)
    single, state = rep.compile(step_fn, accumulate=2), rep.init(init_fn)
    for batch in batches:
        state, _ = single(state, batch)
    three = rep.compile(step_fn, accumulate=2, steps_per_call=3)
    assert_equal_bits(three(rep.init(init_fn), stacked)[0], state)


def test_declared_metrics_of_many_steps_have_steps_first():
    rep = replicas(8)
    step = rep.compile(counting_step, steps_per_call=2)
    x = np.arange(32, dtype=np.float32).reshape(2, 16)
    _, metrics = step(rep.init(init_counting), {"x": x})
    np.testing.assert_array_equal(metrics["own"], x.reshape(2, 8, 2).sum(-1))
    assert metrics["sum"].shape == (2,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda batch: {**batch, "x": batch["x"].astype(np.float16)},
            "`batch/x` is float16[16,4] instead of float32[16,4]",
        ),
        (
            lambda batch: jax.tree.map(lambda leaf: leaf[:8], batch),
            "`batch/x` is float32[8,4] instead of float32[16,4]",
        ),
        (
            lambda batch: {**batch, "z": batch["y"]},
            "`batch/z` is new",
        ),
    ],
)
def test_compiling_again_says_which_argument_changed(change, message):
    def step_fn(state, batch):
        return state, {"x": batch["x"].astype(jnp.float32).mean()}

    step = replicas(8).compile(step_fn)
    state, _ = step({"a": jnp.ones(())}, regression_batch())
    with pytest.warns(RecompilationWarning) as found:
        step(state, change(regression_batch()))
    assert message in str(found[0].message)
    assert found[0].filename == __file__


def test_another_state_compiles_again_and_says_so():
    step, state = momentum_step(8)
    step(state, regression_batch())
    _, other = momentum_step(8)
    other["params"]["extra"] = jnp.ones(())
    with (
        pytest.warns(RecompilationWarning, match="`state/params/extra` is new"),
        pytest.raises(ValueError, match="extra"),
    ):
        step(other, regression_batch())


def test_a_form_seen_before_is_not_compiled_again():
    traces = []

    def step_fn(state, batch):
        traces.append(1)
        return state, {"x": batch["x"].mean()}

    step, state = replicas(8).compile(step_fn), {"a": jnp.ones(())}
    small, big = np.ones(8, np.float32), np.ones(16, np.float32)
    state, _ = step(state, {"x": small})
    with pytest.warns(RecompilationWarning):
        state, _ = step(state, {"x": big})
    for x in (small, big, small):
        state, _ = step(state, {"x": x})
    assert len(traces) == 2


def test_a_step_may_close_over_arrays():
    table = jnp.arange(16.0)

    def step_fn(state, batch):
        return {"total": state["total"] + table.sum()}, {"x": table[batch["i"]].mean()}

    step = replicas(8).compile(step_fn)
    state, metrics = step({"total": jnp.zeros(())}, {"i": np.arange(16)})
    assert float(state["total"]) == 120
    assert float(metrics["x"]) == 7.5


def test_an_nnx_module_is_a_state():
    rep = replicas(8)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        model = nnx.Linear(4, 1, rngs=nnx.Rngs(key))
        return {"params": model, "opt": optimizer.init(model)}

    def loss_fn(model, batch):
        return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()

    def step_fn(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        return apply(optimizer, state, grads), {"loss": loss}

    step, state = rep.compile(step_fn), rep.init(init_fn)
    losses = []
    for _ in range(3):
        state, metrics = step(state, regression_batch())
        losses.append(float(metrics["loss"]))
    assert isinstance(state["params"], nnx.Linear)
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("simultaneous", [True, False])
def test_two_models_and_two_optimizers_in_one_step(simultaneous):
    def trained(n):
        rep = replicas(n)
        parts = [
            rep.wrap_optimizer(adam(), name=name) for name in ("generator", "critic")
        ]
        init_fn, step_fn = gan_trainer(*parts, simultaneous=simultaneous)
        step, state = rep.compile(step_fn), rep.init(init_fn)
        for _ in range(3):
            state, _ = step(state, regression_batch())
        return [state[part]["params"] for part in ("generator", "critic")]

    assert_close(trained(8), trained(1))


def test_an_error_of_the_step_keeps_its_type_and_frame():
    class OwnError(Exception):
        pass

    def broken_step(state, batch):
        raise OwnError("the user's own words")

    step = replicas(8).compile(broken_step)
    with pytest.raises(OwnError, match="the user's own words") as found:
        step({"a": jnp.ones(())}, regression_batch())
    frames = traceback.extract_tb(found.value.__traceback__)
    assert frames[-1].name == "broken_step"
    assert frames[-1].filename == __file__


def test_a_shape_error_of_jax_keeps_the_users_frame():
    def broken_step(state, batch):
        return {"a": state["a"] @ batch["x"]}, {}

    step = replicas(8).compile(broken_step)
    with pytest.raises(TypeError) as found:
        step({"a": jnp.ones((3, 3))}, regression_batch())
    assert "broken_step" in [
        frame.name for frame in traceback.extract_tb(found.value.__traceback__)
    ]


def test_a_failed_check_names_its_replica():
    def step_fn(state, batch):
        checkify.check(batch["x"].sum() < 100, "the sum is {s}", s=batch["x"].sum())
        return state, {"x": batch["x"].mean()}

    step = replicas(8).compile(step_fn, checks=checkify.user_checks)
    state, _ = step({"a": jnp.ones(())}, {"x": np.ones(16, np.float32)})
    bad = np.ones(16, np.float32)
    bad[10] = 200  # two examples a replica: the sixth replica's
    with pytest.raises(checkify.JaxRuntimeError, match=r"replica 5: the sum is 201"):
        step(state, {"x": bad})


def test_a_nan_is_blamed_on_the_replica_where_it_began():
    def step_fn(state, batch):
        return state, {"x": jnp.log(batch["x"]).mean()}

    step = replicas(8).compile(step_fn, checks=checkify.nan_checks)
    x = np.ones(16, np.float32)
    x[3] = -1
    with pytest.raises(checkify.JaxRuntimeError) as found:
        step({"a": jnp.ones(())}, {"x": x})
    assert str(found.value).splitlines() == [
        "replica 1: nan generated by primitive: log.",
        "replicas 0, 2, 3, 4, 5, 6, 7: nan generated by primitive: psum.",
    ]


def test_example_keys_give_the_same_dropout_on_any_number_of_replicas():
    def trained(n):
        rep = replicas(n)
        init_fn, step_fn = dropout_trainer(rep.wrap_optimizer(optax.sgd(0.1)))
        step = rep.compile(step_fn)
        return params_after(
            step, rep.init(init_fn), regression_batch(), key=jax.random.key(1)
        )

    assert_close(trained(8), trained(1))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_placed_batches_feed_a_step(accumulate):
    step, state = momentum_step(8, accumulate=accumulate)
    rep, batch = replicas(8), regression_batch()
    options = replicator.InputOptions(accumulate=accumulate, remainder="refuse")
    with rep.batches([batch], options) as batches:
        placed, _ = step(state, next(batches))
    _, again = momentum_step(8)
    assert_equal_bits(placed, step(again, batch)[0])


def test_a_state_of_numpy_arrays_is_taken_and_left_alone():
    step, state = momentum_step(8)
    host = jax.tree.map(np.array, jax.device_get(state))
    kept = jax.tree.map(np.copy, host)
    after, _ = step(host, regression_batch())
    assert_equal_bits(host, kept)
    assert_equal_bits(after, step(state, regression_batch())[0])


def test_a_state_of_numpy_arrays_is_taken_at_any_call():
    step, state = momentum_step(8)
    state, _ = step(state, regression_batch())
    host = jax.tree.map(np.array, jax.device_get(state))
    expected, _ = step(state, regression_batch())
    assert_equal_bits(step(host, regression_batch())[0], expected)


def test_a_state_on_one_device_is_taken():
    step, state = momentum_step(8)
    local = jax.tree.map(jnp.array, jax.device_get(state))
    after, _ = step(local, regression_batch())
    assert_equal_bits(after, step(state, regression_batch())[0])


@pytest.mark.parametrize(
    ("accumulate", "examples", "message"),
    [
        (1, 12, "over 8 replicas, got 12. Use 8 or 16."),
        (2, 24, "over 8 replicas and 2 microbatches, got 24. Use 16 or 32."),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(accumulate, examples, message):
    step, state = momentum_step(8, accumulate=accumulate)
    with pytest.raises(BatchError, match=re.escape(message)):
        step(state, regression_batch(examples))


def test_a_step_of_no_metrics_and_no_batch_dependence_runs():
    def step_fn(state, batch):
        return {"n": state["n"] + 1}, {}

    step, state = replicas(8).compile(step_fn), {"n": jnp.zeros((), jnp.int32)}
    for _ in range(40):  # more than may be in flight
        state, metrics = step(state, regression_batch())
    assert int(state["n"]) == 40
    assert metrics == {}


def test_a_declared_leaf_needs_its_replica_axis():
    with pytest.raises(ArgumentError, match=r"axis of 8 replicas at `seen`"):
        replicas(8).compile(counting_step)(
            init_counting(None), {"x": np.ones(16, np.float32)}
        )


def test_lowering_compiles_nothing_and_proves():
    step, state = momentum_step(8)
    lowered = step.lower(state, regression_batch())
    assert "all_reduce" in lowered.as_text()
    init_fn, step_fn = trainer(optax.sgd(0.1))
    rep = replicas(8)
    with pytest.raises(ReplicationError):
        rep.compile(step_fn).lower(rep.init(init_fn), regression_batch())


@pytest.mark.parametrize("name", ["accumulate", "steps_per_call"])
def test_numbers_below_one_are_refused_at_the_door(name):
    with pytest.raises(ArgumentError, match=f"`{name}` must be at least 1, got 0"):
        replicas(8).compile(counting_step, **{name: 0})


def test_run_ahead_below_one_is_refused_at_the_door():
    with pytest.raises(
        ArgumentError, match="`max_in_flight` must be at least 1, got 0"
    ):
        replicas(8, max_in_flight=0)


def test_an_array_may_stand_in_a_state_twice():
    w = jnp.arange(3.0)
    step = replicas(8).compile(
        lambda state, batch: ({"a": state["a"] + 1, "b": 2 * state["b"]}, {})
    )
    state, _ = step({"a": w, "b": w}, regression_batch())
    np.testing.assert_array_equal(state["a"], [1, 2, 3])
    np.testing.assert_array_equal(state["b"], [0, 2, 4])


def test_one_state_serves_two_steps():
    rep = replicas(8)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))

    def evaluate(state, batch):
        return state, {"loss": mlp_loss(state["params"], batch)}

    train, measure = rep.compile(step_fn), rep.compile(evaluate)
    state, before = measure(rep.init(init_fn), regression_batch())
    state, _ = train(state, regression_batch())
    _, after = measure(state, regression_batch())
    assert float(after["loss"]) < float(before["loss"])
