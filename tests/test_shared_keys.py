"""A random key that all replicas share, where each wanted its own, is warned of."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import replicator
from replicator import SharedRandomKeyWarning
from tests.steps import (
    adam,
    apply,
    dropout_trainer,
    mlp_loss,
    regression_batch,
    replicas,
    trainer,
)
from tests.test_proof import line_of, prove


def shared(key, n):
    return jax.random.split(key, n)


def test_a_dropout_mask_shared_by_all_replicas_is_warned_of():
    rep = replicas(8)
    init_fn, step_fn = dropout_trainer(rep.wrap_optimizer(adam()), keys=shared)
    with pytest.warns(
        SharedRandomKeyWarning, match="every replica draws the same random numbers at"
    ) as found:
        prove(step_fn, init_fn, regression_batch(), jax.random.key(0))
    assert len(found) == 1
    assert re.search(r"steps\.py:\d+ in (<lambda>|loss_fn)", str(found[0].message))


def add_noise(state, batch, key):
    noise = jax.random.normal(key, batch["x"].shape)
    return state, {"x": (batch["x"] + noise).mean()}


def choose(state, batch, key):
    heads = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return state, {"x": jnp.where(heads, batch["x"], 0.0).mean()}


def draw_with_legacy_key(state, batch, key):
    noise = jax.random.normal(jax.random.PRNGKey(0), batch["x"].shape)
    return state, {"x": (batch["x"] * noise).mean()}


@pytest.mark.parametrize("step_fn", [add_noise, choose, draw_with_legacy_key])
def test_shared_noise_on_examples_is_warned_of(step_fn):
    with pytest.warns(SharedRandomKeyWarning) as found:
        prove(step_fn, {"w": jnp.ones(())}, key=jax.random.key(0))
    assert f"{line_of(step_fn, 'jax.random.')}. Use" in str(found[0].message)


# Warnings are errors here: these tests fail if one appears.


@pytest.mark.parametrize("accumulate", [1, 2])
def test_keys_by_example_give_no_warning(accumulate):
    rep = replicas(8)
    init_fn, step_fn = dropout_trainer(rep.wrap_optimizer(adam()))
    prove(
        step_fn, init_fn, regression_batch(), jax.random.key(0), accumulate=accumulate
    )


def test_keys_by_replica_give_no_warning():
    def step_fn(state, batch, key):
        noise = jax.random.normal(replicator.replica_key(key), batch["x"].shape)
        return state, {"x": (batch["x"] + noise).mean()}

    prove(step_fn, {"w": jnp.ones(())}, key=jax.random.key(0))


def test_noise_on_weights_gives_no_warning():
    rep = replicas(8)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch, key):
        noise = jax.random.normal(key, state["params"]["w1"].shape)
        params = {**state["params"], "w1": state["params"]["w1"] + 0.1 * noise}
        grads = jax.grad(mlp_loss)(params, batch)
        return apply(optimizer, state, grads), {}

    prove(step_fn, init_fn, regression_batch(), jax.random.key(0))


def test_noise_on_reduced_gradients_gives_no_warning():
    def step_fn(state, batch, key):
        mean = lax.pmean(batch["x"].mean(), "replica")
        return {"w": state["w"] + mean + jax.random.normal(key, ())}, {}

    prove(step_fn, {"w": jnp.ones(())}, key=jax.random.key(0))
