"""A padded batch is taken only where its mask reaches what the step learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator import Mean, PerReplica
from replicator.errors import BatchError
from tests.steps import (
    apply,
    errors,
    init_mlp,
    mlp_loss,
    regression_batch,
    replicas,
    trainer,
    weighted_loss,
    weighted_trainer,
)


def train(make, *, accumulate=1, n=2):
    """Train on a full batch and an uneven one."""
    rep = replicas(n)
    init_fn, step_fn = make(rep)
    step = rep.compile(step_fn, accumulate=accumulate)
    state = rep.init(init_fn)
    options = replicator.InputOptions(epochs=1, accumulate=accumulate)
    with rep.batches([regression_batch(), regression_batch(10)], options) as batches:
        for batch in batches:
            state, metrics = step(state, batch)
    return state, metrics


def sgd(rep, **options):
    return rep.wrap_optimizer(optax.sgd(0.1), **options)


def with_masked(what):
    """Return a trainer whose gradients ignore the mask, which `what` reads."""

    def make(rep):
        optimizer = sgd(rep)
        init_fn, step_fn = trainer(optimizer)

        def init(key):
            return init_fn(key) | {"extra": what(None, {"mask": jnp.ones(2)})[0]}

        def step(state, batch):
            extra, metrics = what(state["extra"], batch)
            after, loss = step_fn({k: state[k] for k in ("params", "opt")}, batch)
            return after | {"extra": extra}, loss | metrics

        return init, step

    return make


def metric_weight(extra, batch):
    return jnp.zeros(()), {"rows": Mean(jnp.ones(()), batch["mask"].sum())}


def statistics(extra, batch):
    return replicator.all_reduce(batch["mask"].mean()), {}


def own_count(extra, batch):
    return PerReplica(batch["mask"].sum()), {}


def one_of_two(rep):
    masked, careless = sgd(rep, name="masked"), sgd(rep, name="careless")
    init_a, step_a = weighted_trainer(masked)
    init_b, step_b = trainer(careless)

    def step(state, batch):
        a, metrics = step_a(state["a"], batch)
        b, _ = step_b(state["b"], batch)
        return {"a": a, "b": b}, metrics

    return lambda key: {"a": init_a(key), "b": init_b(key)}, step


def one_leaf_of_many(rep):
    optimizer = sgd(rep)
    init_fn, _ = trainer(optimizer)

    def loss_fn(params, batch):
        careless = errors(jax.lax.stop_gradient(params) | {"b1": params["b1"]}, batch)
        fixed = params | {"b1": jax.lax.stop_gradient(params["b1"])}
        return weighted_loss(fixed, batch)[0] + careless.mean()

    def step(state, batch):
        return apply(optimizer, state, jax.grad(loss_fn)(state["params"], batch)), {}

    return init_fn, step


def by_hand(loss_fn):
    def make(rep):
        def step(params, batch):
            grads = replicator.all_reduce(jax.grad(loss_fn)(params, batch), "mean")
            rows = {"rows": Mean(jnp.ones(()), batch["mask"].sum())}
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rows

        return init_mlp, step

    return make


CARELESS = {
    "a metric's weight": (with_masked(metric_weight), "gradients of `params/"),
    "running statistics": (with_masked(statistics), "gradients of `params/"),
    "state of each replica's own": (with_masked(own_count), "gradients of `params/"),
    "one of two optimizers": (one_of_two, "gradients of `careless/b1`"),
    "some of the leaves": (one_leaf_of_many, "gradients of `params/b1`"),
    "no optimizer, and a metric": (by_hand(mlp_loss), "a state computed"),
}


PRODUCTS = [
    (case, k) for case in CARELESS for k in (1, 2) if k == 1 or "no" not in case
]


@pytest.mark.parametrize(("case", "accumulate"), PRODUCTS)
def test_a_mask_that_reaches_no_more_is_refused(case, accumulate):
    make, what = CARELESS[case]
    with pytest.raises(BatchError, match=f"10 examples at batch 1 and {what}"):
        train(make, accumulate=accumulate)


RIGHT = {
    "a weight": lambda rep: weighted_trainer(sgd(rep)),
    "a loss of its own": lambda rep: trainer(
        sgd(rep), lambda params, batch: weighted_loss(params, batch)[0]
    ),
    "an accumulating optimizer": lambda rep: weighted_trainer(sgd(rep, accumulate=2)),
    "no optimizer": by_hand(lambda params, batch: weighted_loss(params, batch)[0]),
    "metrics alone": lambda rep: (
        lambda key: {"n": jnp.zeros(())},
        lambda state, batch: (state, {"n": Mean(1.0, batch["mask"].sum())}),
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_mask_that_reaches_what_is_learnt_is_enough(case):
    _, metrics = train(RIGHT[case])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(metrics))


def test_an_optimizer_that_reads_no_batch_needs_no_mask():
    def make(rep):
        init_fn, step_fn = weighted_trainer(sgd(rep))
        decay = sgd(rep, name="decay")

        def step(state, batch):
            after, metrics = step_fn(state["a"], batch)
            b = apply(decay, state["b"], state["b"]["params"])
            return {"a": after, "b": b}, metrics

        own = {"params": jnp.ones(3), "opt": decay.init(jnp.ones(3))}
        return lambda key: {"a": init_fn(key), "b": own}, step

    state, _ = train(make)
    np.testing.assert_allclose(state["b"]["params"], 0.9**2 * np.ones(3), rtol=1e-6)
