"""A compiled step takes what it can take, and says what it cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator.errors import ArgumentError, BatchError, ReplicationError
from tests.steps import mlp_loss, regression_batch, replicas, trainer


@pytest.fixture
def rep():
    return replicas(2)


def total(state, batch):
    return jax.tree.map(lambda leaf: leaf + 1.0, state), {"sum": batch["y"].sum()}


def test_an_array_that_stands_twice_in_the_state_is_donated_once(rep):
    step = rep.compile(total)
    state, _ = step({"a": np.ones(3, np.float32)}, regression_batch())
    twice = {"a": state["a"], "b": state["a"]}
    state, _ = rep.compile(total)(twice, regression_batch())
    np.testing.assert_array_equal(state["a"], state["b"])


def test_a_state_on_one_device_is_moved_to_all(rep):
    state = jax.device_put({"a": jnp.ones(3)}, jax.devices()[5])
    state, _ = rep.compile(total)(state, regression_batch())
    np.testing.assert_array_equal(state["a"], np.full(3, 2.0))


@pytest.mark.filterwarnings("ignore::replicator.RecompilationWarning")
def test_states_of_two_kinds_take_turns_without_compiling_again(rep):
    traces = []

    def step_fn(state, batch):
        traces.append(jax.tree.structure(state))
        return total(state, batch)

    step = rep.compile(step_fn)
    for _ in range(3):
        step({"a": jnp.ones(3)}, regression_batch())
        step({"b": jnp.ones(3)}, regression_batch())
    assert len(traces) == 2


def test_a_batch_placed_for_another_step_is_refused(rep):
    options = replicator.InputOptions(accumulate=4)
    with (
        rep.batches([regression_batch()], options) as batches,
        pytest.raises(BatchError) as caught,
    ):
        rep.compile(total)({"a": jnp.ones(3)}, next(batches))
    assert str(caught.value) == (
        "`batch` must be placed for accumulate=1 and steps_per_call=1, got 4 and 1. "
        "Set both in `rep.batches(dataset, InputOptions(...))`."
    )


def test_two_optimizers_of_one_name_are_refused(rep):
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))
    init_fn, step_fn = trainer(optimizer)

    def twice(key):
        return init_fn(key) | {"other": optimizer.init(init_fn(key)["params"])}

    def step(state, batch):
        after, metrics = step_fn(state, batch)
        return after | {"other": state["other"]}, metrics

    with pytest.raises(ArgumentError, match="`name` must differ between"):
        rep.compile(step)(rep.init(twice), regression_batch())


def test_an_ordered_optimizer_needs_an_ordered_replicator(rep):
    init_fn, step_fn = trainer(
        replicator.wrap_optimizer(optax.sgd(0.1), reduction="ordered")
    )
    with pytest.raises(ArgumentError, match="got 'ordered' for `params` and 'fast'"):
        rep.compile(step_fn)(rep.init(init_fn), regression_batch())


def test_a_third_parameter_with_a_default_is_no_key(rep):
    seen = []

    def step_fn(state, batch, train=True):
        seen.append(train)
        return total(state, batch)

    rep.compile(step_fn)({"a": jnp.ones(3)}, regression_batch())
    assert seen == [True]


@pytest.mark.parametrize("shape", ["cond", "while"])
def test_a_collective_that_some_replicas_may_miss_is_refused(rep, shape):
    def cond_step(state, batch):
        value = jax.lax.cond(
            batch["y"].sum() > 0, replicator.all_reduce, lambda x: x, batch["y"].sum()
        )
        return state, {"value": value}

    def while_step(state, batch):
        value = jax.lax.while_loop(
            lambda x: x < 3, lambda x: replicator.all_reduce(x) + 1, batch["y"].sum()
        )
        return state, {"value": value}

    step = rep.compile(cond_step if shape == "cond" else while_step)
    with pytest.raises(
        ReplicationError, match="must be reached by all replicas, got a"
    ):
        step({"a": jnp.ones(3)}, regression_batch())


def test_a_run_with_skipped_updates_goes_on_and_counts_them(rep):
    optimizer = rep.wrap_optimizer(optax.sgd(0.1), skip_nonfinite=True)
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        grads = jax.grad(mlp_loss)(state["params"], batch)
        bad = batch["bad"].max()
        grads = jax.tree.map(lambda g: jnp.where(bad > 0, jnp.nan, g), grads)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    good = regression_batch() | {"bad": np.zeros(16, np.float32)}
    bad = good | {"bad": np.ones(16, np.float32)}
    result = rep.run(
        step_fn, [good, bad, good], init_fn=init_fn, steps=3, display=False
    )
    assert result.state["opt"].skipped == 1
    assert np.isfinite(result.metrics["gradient_norm"])


def test_half_precision_gradients_are_unscaled_in_single_precision(rep):
    scale = replicator.DynamicLossScale(initial=2.0**25)
    optimizer = rep.wrap_optimizer(optax.sgd(1.0), loss_scale=scale)
    params = {"w": jnp.zeros(1000, jnp.float16)}
    state = optimizer.init(params)
    grads = {"w": jnp.full(1000, 2.0**15, jnp.float16)}
    updates, state = optimizer.update(grads, state, params)
    np.testing.assert_allclose(updates["w"], -(2.0**-10), rtol=1e-3)


def test_a_hook_sees_the_state_of_the_user(rep):
    seen = []
    hook = replicator.hooks.StateCallback(
        lambda event: seen.append(set(event.state)), replicator.hooks.every(n_steps=1)
    )
    rep.run(
        total,
        [regression_batch()],
        init_fn=lambda key: {"a": jnp.ones(3)},
        steps=2,
        hooks=[hook],
        display=False,
    )
    assert seen == [{"a"}, {"a"}]


def test_a_second_run_sets_the_first_aside(rep, tmp_path):
    for seed in (1, 2):
        rep.run(
            total,
            [regression_batch()],
            init_fn=lambda key: {"a": jnp.ones(3)},
            steps=2,
            seed=seed,
            directory=tmp_path,
            display=False,
        )
    assert '"seed": 2' in (tmp_path / "run.json").read_text()
    assert '"seed": 1' in (tmp_path / "earlier" / "0" / "run.json").read_text()


def test_a_missing_key_comes_with_what_there_is(rep):
    def step_fn(state, batch):
        return state, {"x": batch["imgae"].mean()}

    with pytest.raises(KeyError, match="imgae") as caught:
        rep.compile(step_fn)({"a": jnp.ones(3), "b": {}}, regression_batch())
    assert caught.value.__notes__[:2] == [
        "The batch of one replica holds `x` float32[8,4], `y` float32[8].",
        "The state holds `a`, `b`. Use one of these.",
    ]


def test_a_missing_key_of_an_evaluation_comes_with_what_there_is(rep):
    with pytest.raises(KeyError, match="z") as caught:
        rep.evaluate(
            lambda state, batch: {"x": batch["z"]},
            [regression_batch()],
            state={"a": 1.0},
        )
    assert "`mask` float32[64], `x` float32[64,4]" in caught.value.__notes__[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_keys_of_the_old_kind_are_taken(rep, depth):
    key = jax.random.PRNGKey(3)
    keys = jax.random.split(key, 2) if depth else key
    batch = regression_batch()
    if depth:
        batch = jax.tree.map(lambda leaf: np.stack([leaf] * 2), batch)

    def step_fn(state, batch, key):
        return state, {"u": jax.random.uniform(key)}

    step = rep.compile(step_fn, steps_per_call=depth + 1)
    _, metrics = step({"a": jnp.ones(3)}, batch, keys)
    expected = jax.vmap(jax.random.uniform)(keys) if depth else jax.random.uniform(key)
    np.testing.assert_array_equal(metrics["u"], expected)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_a_step_called_where_jax_traces_is_refused(rep, transform):
    step = rep.compile(total)

    def call(x):
        return step({"a": jnp.ones(3)}, regression_batch())[1]["sum"] * x.sum()

    with pytest.raises(ArgumentError, match="`step` must be called outside of `jit`"):
        transform(call)(jnp.ones(3))
