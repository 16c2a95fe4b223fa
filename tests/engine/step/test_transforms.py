"""A step gets its key where it takes one, and keeps the form of its state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator.errors import ArgumentError, StateError
from tests.steps import assert_equal_bits, dropout_trainer, regression_batch, replicas


def test_a_third_parameter_receives_a_key():
    def step_fn(state, batch, key):
        return {"key": key}, {}

    key = jax.random.key(3)
    state, _ = replicas(8).compile(step_fn)({"key": key}, regression_batch(), key)
    assert_equal_bits(
        jax.random.key_data(state["key"]),
        jax.random.key_data(key),
    )


def test_a_keyword_parameter_is_no_key():
    def step_fn(state, batch, *, scale=2.0):
        return {"a": state["a"] * scale}, {}

    state, _ = replicas(8).compile(step_fn)({"a": jnp.ones(())}, regression_batch())
    assert float(state["a"]) == 2


def test_a_step_that_takes_a_key_must_get_one():
    rep = replicas(8)
    init_fn, step_fn = dropout_trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    with pytest.raises(ArgumentError, match="`key` must be given to a step"):
        rep.compile(step_fn)(rep.init(init_fn), regression_batch())


def test_another_state_structure_is_refused_by_leaf():
    def step_fn(state, batch):
        return {"a": state["a"]}, {}

    state = {"a": jnp.ones(()), "b": jnp.ones(())}
    with pytest.raises(StateError, match="got another: `b` is missing"):
        replicas(8).compile(step_fn)(state, regression_batch())


def test_a_step_must_return_a_pair():
    with pytest.raises(StateError, match=r"must return \(state, metrics\), got dict"):
        replicas(8).compile(lambda state, batch: state)(
            {"a": jnp.ones(())}, {"x": np.ones(8)}
        )


def test_an_unknown_axis_is_told_with_the_one_there_is():
    def step_fn(state, batch):
        return {"a": jax.lax.pmean(state["a"], "batch")}, {}

    with pytest.raises(NameError, match="batch") as found:
        replicas(8).compile(step_fn)({"a": jnp.ones(())}, {"x": np.ones(8)})
    assert "axis is named 'replica'" in found.value.__notes__[0]


def test_weak_types_do_not_compile_again():
    traces = []

    def step_fn(state, batch):
        traces.append(1)
        return {"total": state["total"] + batch["x"].size, "one": 1.0}, {}

    step, state = replicas(8).compile(step_fn), {"total": 0, "one": 1.0}
    for _ in range(3):
        state, _ = step(state, {"x": np.ones(8, np.float32)})
    assert len(traces) == 1
