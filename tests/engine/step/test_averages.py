"""An average of parameters moves once per update, and starts as a copy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator.errors import ArgumentError
from tests.steps import (
    apply,
    assert_close,
    mlp_loss,
    regression_batch,
    replicas,
    trainer,
)


def averaged_trainer(optimizer, average):
    init_plain, _ = trainer(optimizer)

    def init_fn(key):
        state = init_plain(key)
        return {**state, "average": average.init(state["params"])}

    def step_fn(state, batch):
        grads = jax.grad(mlp_loss)(state["params"], batch)
        after = apply(optimizer, state, grads)
        return {
            **after,
            "average": average.update(after["params"], state["average"]),
        }, {}

    return init_fn, step_fn


@pytest.mark.parametrize("accumulate", [1, 4])
def test_it_follows_its_formula_once_per_update(accumulate):
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))
    init_fn, step_fn = averaged_trainer(optimizer, replicator.ema(0.9))
    step, state = rep.compile(step_fn, accumulate=accumulate), rep.init(init_fn)
    expected = jax.device_get(state["params"])
    for _ in range(3):
        state, _ = step(state, regression_batch())
        expected = jax.tree.map(
            lambda old, new: 0.9 * old + 0.1 * np.asarray(new),
            expected,
            state["params"],
        )
    assert_close(state["average"], expected)


def test_it_starts_as_a_copy_that_can_be_donated_too():
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))
    init_fn, step_fn = averaged_trainer(optimizer, replicator.ema(0.9))
    state = init_fn(
        jax.random.key(0)
    )  # outside `jit`: a shared buffer would stay shared
    pairs = zip(*map(jax.tree.leaves, (state["params"], state["average"])), strict=True)
    assert all(a is not b for a, b in pairs)
    rep.compile(step_fn)(state, regression_batch())


def test_a_decay_of_zero_is_the_parameters():
    average = replicator.ema(0.0)
    params = {"w": jnp.asarray(3.0)}
    assert float(average.update(params, {"w": jnp.asarray(1.0)})["w"]) == 3


def test_half_precision_keeps_a_constant():
    average = replicator.ema(0.999)
    params = {"w": jnp.asarray(1.7, jnp.bfloat16)}
    assert average.update(params, params)["w"] == params["w"]
    assert average.update(params, params)["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0, float("nan")])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ArgumentError, match="`decay` must be at least 0 and below 1"):
        replicator.ema(decay)
