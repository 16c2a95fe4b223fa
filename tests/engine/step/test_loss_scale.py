"""A dynamic loss scale: halved at overflow, doubled in calm, invisible otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator import DynamicLossScale, wrap_optimizer
from replicator.errors import ArgumentError
from tests.steps import (
    apply,
    assert_close,
    assert_equal_bits,
    init_mlp,
    lenient,
    mlp_loss,
    params_after,
    regression_batch,
    replicas,
    trainer,
)


def scaled_trainer(optimizer, dtype=jnp.float32):
    """Train in float32 by gradients of a scaled loss, computed in `dtype`."""
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        def loss_fn(params):
            low = jax.tree.map(lambda leaf: leaf.astype(dtype), (params, batch))
            loss = mlp_loss(*low)
            return replicator.scale_loss(loss, state["opt"]), loss

        grads, loss = jax.grad(loss_fn, has_aux=True)(state["params"])
        return apply(optimizer, state, grads), {"loss": loss.astype(jnp.float32)}

    return init_fn, step_fn


def scaled_step(n, loss_scale, *, dtype=jnp.float32, accumulate=1):
    rep = replicas(n)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1), loss_scale=loss_scale)
    init_fn, step_fn = scaled_trainer(optimizer, dtype)
    return rep.compile(step_fn, accumulate=accumulate), rep.init(init_fn)


def path_of_scale(finite, *, n=4, **options):
    """Feed the schedule alone; return the scale after each update."""
    schedule = DynamicLossScale(**options)
    state, path = schedule.init(), []
    for each in finite:
        state = schedule.update(state, jnp.asarray(each))
        path.append(float(state.value))
    return path


def test_it_grows_after_an_interval_without_overflow():
    path = path_of_scale([True] * 5, initial=8.0, growth_interval=2)
    assert path == [8, 16, 16, 32, 32]


def test_it_halves_at_every_overflow():
    assert path_of_scale([False] * 3, initial=8.0) == [4, 2, 1]


def test_an_overflow_starts_the_count_anew():
    finite = [True, False, True, True]
    assert path_of_scale(finite, initial=8.0, growth_interval=2) == [8, 4, 4, 8]


def test_it_never_falls_below_one_and_never_turns_infinite():
    assert path_of_scale([False] * 3, initial=2.0) == [1, 1, 1]
    start = float(np.float32(2.0**127))
    assert path_of_scale([True] * 2, initial=start, growth_interval=1) == [start, start]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_finite_training_equals_unscaled_training(accumulate):
    rep, batch = replicas(2), regression_batch()
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    expected = params_after(rep.compile(step_fn), rep.init(init_fn), batch, steps=2)
    scaled = scaled_step(2, DynamicLossScale(), accumulate=accumulate)
    assert_close(params_after(*scaled, batch, steps=2), expected)


def test_gradients_too_small_for_half_precision_are_kept():
    # Gradients of about 1e-10 are zero in float16 (its smallest number is 6e-8).
    tiny = jax.tree.map(lambda leaf: leaf * np.float32(1e-5), regression_batch())

    def largest(initial):
        scale = DynamicLossScale(initial=initial)
        optimizer = wrap_optimizer(optax.identity(), loss_scale=scale)
        init_fn, step_fn = scaled_trainer(optimizer, jnp.float16)
        state = init_fn(jax.random.key(0))
        state["params"]["w1"] = 0 * state["params"]["w1"]  # so that updates show whole
        after, _ = step_fn(state, tiny)
        return float(abs(after["params"]["w1"]).max())

    assert largest(1.0) == 0
    assert 0 < largest(2.0**15) < 1e-6


def test_overflow_is_skipped_counted_and_halves_the_scale_everywhere():
    step, state = scaled_step(8, DynamicLossScale(initial=2.0**15))
    batch = regression_batch()
    batch["y"][5] = 3e38  # one replica's loss overflows
    before = jax.device_get(state["params"])
    state, _ = step(state, batch)
    assert_equal_bits(state["params"], before)
    assert [int(s.data) for s in state["opt"].skipped.addressable_shards] == [1] * 8
    scales = [float(s.data) for s in state["opt"].scale.value.addressable_shards]
    assert scales == [2.0**14] * 8


def test_the_scale_falls_until_half_precision_holds_it():
    step, state = scaled_step(2, DynamicLossScale(initial=2.0**24), dtype=jnp.float16)
    for _ in range(14):
        state, _ = step(state, regression_batch())
    assert 1 <= float(state["opt"].scale.value) < 2.0**24
    assert 0 < int(state["opt"].skipped) < 14


def test_the_gradient_norm_is_reported_unscaled():
    rep, batch = replicas(2), regression_batch()
    optimizer = rep.wrap_optimizer(optax.sgd(0.1), loss_scale=DynamicLossScale())
    init_fn, step_fn = scaled_trainer(optimizer)
    result = rep.run(step_fn, [batch], init_fn=init_fn, steps=1, display=False)
    norm = optax.tree.norm(jax.grad(mlp_loss)(init_mlp(None), batch))
    np.testing.assert_allclose(result.metrics["gradient_norm"], norm, rtol=1e-5)


def test_clipping_sees_unscaled_gradients():
    params, batch = init_mlp(None), regression_batch()
    grads = jax.grad(mlp_loss)(params, batch)
    tx = optax.clip_by_global_norm(1e-3)
    optimizer = wrap_optimizer(tx, loss_scale=DynamicLossScale(initial=1024.0))
    state = optimizer.init(params)
    scaled = jax.tree.map(lambda g: g * 1024, grads)
    found, _ = optimizer.update(scaled, state, params)
    assert_close(found, tx.update(grads, tx.init(params))[0])


def test_without_a_scale_the_loss_stays_as_it_is():
    state = wrap_optimizer(optax.sgd(0.1)).init(jnp.zeros(()))
    assert float(replicator.scale_loss(jnp.asarray(3.0), state)) == 3


@pytest.mark.parametrize(
    "options", [{"initial": 0.0}, {"factor": 1.0}, {"growth_interval": 0}]
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises(ArgumentError, match="`loss_scale` must have initial > 0"):
        DynamicLossScale(**options)


def test_a_loss_in_half_precision_is_scaled_in_single():
    state = wrap_optimizer(optax.sgd(0.1), loss_scale=DynamicLossScale()).init({})
    scaled = replicator.scale_loss(jnp.asarray(10.0, jnp.float16), state)
    assert scaled.dtype == jnp.float32
    assert scaled == 10 * 2.0**15


def test_parameters_in_half_precision_keep_what_is_unscaled():
    # Squares of gradients of 1e-6 are zero in float16, and Adam divides by their root.
    optimizer = wrap_optimizer(
        lenient(optax.adam(1e-2)), loss_scale=DynamicLossScale(initial=2.0**10)
    )
    params = {"w": jnp.ones(3, jnp.float16)}
    state = optimizer.init(params)
    grads = {"w": jnp.full(3, 1e-6 * 2.0**10, jnp.float16)}
    updates, state = optimizer.update(grads, state, params)
    assert updates["w"].dtype == jnp.float16
    np.testing.assert_allclose(updates["w"], -1e-2, rtol=5e-2)
