"""What follows from an update is exact under accumulation, or refused by name."""

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
    params_after,
    regression_batch,
    replicas,
    trainer,
)


def stepped(accumulate, step_fn, init_fn, *, steps=2):
    rep = replicas(2)
    step = rep.compile(step_fn, accumulate=accumulate)
    return params_after(step, rep.init(init_fn), regression_batch(), steps=steps)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_a_learning_rate_of_the_users_own_counter_is_that_of_one_batch(accumulate):
    optimizer = replicator.wrap_optimizer(optax.sgd(1.0))
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        grads = jax.grad(mlp_loss)(state["params"], batch)
        rate = 0.1 / (1.0 + state["count"].astype(jnp.float32))
        moved = apply(optimizer, state, jax.tree.map(lambda g: g * rate, grads))
        params = jax.tree.map(
            lambda new, old: old + (new - old) / (1.0 + state["count"]),
            moved["params"],
            state["params"],
        )
        count = state["count"] + replicator.is_last_microbatch().astype(jnp.float32)
        return {**moved, "params": params, "count": count}, {}

    def counting_init(key):
        return init_fn(key) | {"count": jnp.zeros(())}

    assert_close(
        stepped(accumulate, step_fn, counting_init), stepped(1, step_fn, counting_init)
    )


def test_an_update_that_reads_the_batch_besides_gradients_is_refused():
    optimizer = replicator.wrap_optimizer(optax.sgd(0.1))
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        loss, grads = jax.value_and_grad(mlp_loss)(state["params"], batch)
        after = apply(optimizer, state, grads)
        scale = replicator.all_reduce(loss)
        shrunk = jax.tree.map(lambda leaf: leaf * scale, after["params"])
        return {**after, "params": shrunk}, {}

    with pytest.raises(ArgumentError) as caught:
        stepped(2, step_fn, init_fn)
    assert str(caught.value) == (
        "`accumulate` must be 1 where `params/b1` of the returned state depends on an "
        "update and, other than by gradients, on the batch. Compute it before the "
        "update, or from reduced values alone."
    )


def test_a_metric_of_the_loss_after_the_update_is_refused():
    optimizer = replicator.wrap_optimizer(optax.sgd(0.1))
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        after = apply(optimizer, state, jax.grad(mlp_loss)(state["params"], batch))
        return after, {"late": mlp_loss(after["params"], batch)}

    with pytest.raises(ArgumentError, match="`late/value` of the returned metrics"):
        stepped(2, step_fn, init_fn)


def test_a_metric_of_the_update_alone_is_that_of_one_batch():
    optimizer = replicator.wrap_optimizer(optax.sgd(0.1))
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        after = apply(optimizer, state, jax.grad(mlp_loss)(state["params"], batch))
        moved = jax.tree.map(jnp.subtract, after["params"], state["params"])
        return after, {"moved": optax.tree.norm(moved)}

    rep, batch = replicas(2), regression_batch()
    one, four = (
        rep.compile(step_fn, accumulate=k)(rep.init(init_fn), batch)[1]["moved"]
        for k in (1, 4)
    )
    np.testing.assert_allclose(four, one, rtol=1e-5)


def test_an_update_under_a_condition_is_refused_by_name():
    optimizer = replicator.wrap_optimizer(optax.sgd(0.1))
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        grads = jax.grad(mlp_loss)(state["params"], batch)
        due = state["params"]["w1"].sum() < 9
        return jax.lax.cond(
            due, lambda s: apply(optimizer, s, grads), lambda s: s, state
        ), {}

    with pytest.raises(ArgumentError, match=r"under `lax\.cond`, or in `lax\.scan`"):
        stepped(2, step_fn, init_fn)
    optimizer = replicator.wrap_optimizer(optax.sgd(0.1), reduction="ordered")
    rep = replicas(2, reduction="ordered")
    with pytest.raises(ArgumentError, match=r"`reduction` must be 'fast' .*'ordered'"):
        rep.compile(step_fn)(rep.init(trainer(optimizer)[0]), regression_batch())


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_an_average_of_statistics_moves_once_per_update(accumulate):
    optimizer = replicator.wrap_optimizer(optax.sgd(0.0))
    init_fn, _ = trainer(optimizer)
    average = replicator.ema(0.5)

    def step_fn(state, batch):
        after = apply(optimizer, state, jax.grad(mlp_loss)(state["params"], batch))
        return after | {"average": average.update(jnp.ones(()), state["average"])}, {}

    rep = replicas(2)
    state = rep.init(lambda key: init_fn(key) | {"average": jnp.zeros(())})
    state, _ = rep.compile(step_fn, accumulate=accumulate)(state, regression_batch())
    assert state["average"] == 0.5


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_microbatch_of_padding_counts_not_even_by_a_nan(accumulate):
    optimizer = replicator.wrap_optimizer(optax.sgd(0.1))
    init_fn, _ = trainer(optimizer)

    def loss_fn(params, batch):
        mask = batch["mask"]
        return mlp_loss(params, batch) * mask.sum() / mask.sum(), mask.sum()

    def step_fn(state, batch):
        (loss, weight), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state["params"], batch
        )
        after = apply(optimizer, state, grads, weight=weight)
        return after, {"loss": replicator.Mean(loss, weight)}

    batch = regression_batch()
    batch["mask"] = (np.arange(16) < 4).astype(np.float32)
    rep = replicas(2)
    step = rep.compile(step_fn, accumulate=accumulate)
    state, metrics = step(rep.init(init_fn), batch)
    assert np.isfinite(metrics["loss"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"]))
