"""A norm that is called twice in a step moves twice, or is refused by name."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from replicator import strategies
from replicator.errors import ArgumentError
from replicator.nnx import BatchNorm, params_of, value_and_grad, with_params
from tests.steps import replicas

BATCH = {
    name: np.random.default_rng(seed).normal(size=(16, 3)).astype(np.float32)
    for seed, name in enumerate(("real", "fake"))
}
MOMENTUM = 0.9


def in_one_loss(model, batch):
    return (model(batch["real"]) ** 2 - model(batch["fake"])).mean()


def on_a_copy(model, batch):
    return (model(batch["real"]) ** 2 - nnx.clone(model)(batch["fake"])).mean()


def of_the_fake(model, batch):
    return model(batch["fake"]).mean()


def trainer(tx, *losses):
    """Return a trainer by the sum of losses; each moves what the one before left."""

    def init_fn(key):
        model = BatchNorm(3, momentum=MOMENTUM, rngs=nnx.Rngs(0))
        return {"model": model, "opt": tx.init(params_of(model))}

    def step_fn(state, batch):
        model, total = state["model"], []
        for loss_fn in losses:
            (_, model), grads = value_and_grad(loss_fn)(model, batch)
            total.append(grads)
        params = params_of(model)
        grads = jax.tree.map(lambda *each: sum(each), *total)
        updates, opt = tx.update(grads, state["opt"], params)
        model = with_params(model, optax.apply_updates(params, updates))
        return {"model": model, "opt": opt}, {}

    return init_fn, step_fn


def means_after(losses, n, accumulate, *, strategy=None, own=1):
    rep = replicas(n, strategy=strategy)
    tx = rep.wrap_optimizer(optax.sgd(0.1), accumulate=own)
    init_fn, step_fn = trainer(tx, *losses)
    step = rep.compile(step_fn, accumulate=accumulate)
    return step(rep.init(init_fn), BATCH)[0]["model"].mean[...]


@pytest.mark.parametrize("n", [1, 4])
def test_without_microbatches_statistics_move_call_by_call(n):
    moved = np.zeros(3)
    for name in ("real", "fake"):
        moved = MOMENTUM * moved + (1 - MOMENTUM) * BATCH[name].mean(0)
    np.testing.assert_allclose(means_after([in_one_loss], n, 1), moved, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"strategy": strategies.fsdp()}])
@pytest.mark.parametrize("losses", [[in_one_loss], [of_the_fake, of_the_fake]])
def test_with_microbatches_a_second_call_is_refused(losses, options):
    with pytest.raises(ArgumentError, match=r"batch norm .* twice .*_twice\.py:\d+"):
        means_after(losses, 2, 2, **options)


def test_in_a_loop_that_feeds_microbatches_a_second_call_is_refused():
    with pytest.raises(ArgumentError, match=r"batch norm .* twice"):
        means_after([in_one_loss], 2, 1, own=2)


def test_a_second_call_on_a_copy_is_right_at_any_accumulation():
    expected = (1 - MOMENTUM) * BATCH["real"].mean(0)
    found = means_after([on_a_copy], 2, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
