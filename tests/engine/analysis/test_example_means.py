"""A run warns of gradients that are not means over a replica's examples."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator import ExampleMeanWarning
from replicator.engine.analysis import example_means
from tests.steps import FEATURES, replicas, trainer

ROWS = 16
BATCH = {
    "x": np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=ROWS).astype(np.float32),
    "mask": np.ones(ROWS, np.float32),
    "label": np.zeros(ROWS, np.int32),
}


def predicted(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def losses(params, batch):
    return (predicted(params, batch) - batch["y"]) ** 2


def init_params(key):
    return {"w": jnp.ones(FEATURES), "b": jnp.zeros(())}


def found(loss, change=lambda grads: grads, **options):
    """Run two steps; return what is warned of, or None."""
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        params = init_params(key)
        return {"params": params, "opt": optimizer.init(params)}

    def step_fn(state, batch):
        grads = change(jax.grad(loss)(state["params"], batch))
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    return warned(rep, step_fn, init_fn, **options)


def warned(rep, step_fn, init_fn, batch=BATCH, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"init_fn": init_fn, "display": False} | options
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            rep.run(step_fn, [batch] * 2, **options)
    texts = [
        str(each.message) for each in caught if each.category is ExampleMeanWarning
    ]
    assert len(texts) <= 1
    return texts[0] if texts else None


def normed(params, batch):
    x = batch["x"] - batch["x"].mean(0)
    return losses(params, batch | {"x": x}).mean()


def masked(params, batch):
    return (losses(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


def crossed(params, batch):
    return ((predicted(params, batch)[:, None] - batch["y"]) ** 2).mean()


WRONG = {
    "sum": (lambda p, b: losses(p, b).sum(), "a sum that is not divided"),
    "global": (lambda p, b: losses(p, b).sum() / ROWS, "a sum that is not divided"),
    "replicas": (
        lambda p, b: losses(p, b).mean() / replicator.num_replicas(),
        "divided by the number of replicas, too",
    ),
    "masked": (masked, "a sum over `mask` of this replica's"),
    "crossed": (crossed, r"every one with every other \(`float32\[8,1\]"),
    "normed": (normed, "a statistic of this replica's examples alone"),
    "root": (lambda p, b: jnp.sqrt(losses(p, b).mean()), "a statistic"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_depends_on_the_number_of_replicas_is_warned_of(name):
    loss, text = WRONG[name]
    assert re.search(text, found(loss) or "nothing")


def clipped(grads):
    norm = optax.global_norm(grads)
    return jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)


@pytest.mark.parametrize(
    "change", [clipped, lambda grads: jax.tree.map(jnp.sign, grads)]
)
def test_gradients_that_are_changed_before_the_mean_are_warned_of(change):
    text = found(lambda p, b: losses(p, b).mean(), change)
    assert text is not None
    assert "Put what changes them into the optimizer" in text


def decayed(params, batch):
    return losses(params, batch).mean() + 0.1 * jnp.sum(params["w"] ** 2)


def logistic(params, batch):
    logits = batch["x"] * params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["label"]
    ).mean()


RIGHT = {
    "mean": lambda p, b: losses(p, b).mean(),
    "mean of parts": lambda p, b: losses(p, b).reshape(-1, 1).mean(0).sum(),
    "sum over features": lambda p, b: ((b["x"] * p["w"]) ** 2).sum(-1).mean(),
    "length": lambda p, b: losses(p, b).sum() / len(b["y"]),
    "average": lambda p, b: jnp.average(losses(p, b), weights=jnp.ones(len(b["y"]))),
    "vmapped": lambda p, b: jax.vmap(lambda x, y: (x @ p["w"] - y) ** 2)(
        b["x"], b["y"]
    ).mean(),
    "decayed": decayed,
    "logistic": logistic,
    "scaled": lambda p, b: 0.5 * losses(p, b).mean(),
    # Their cotangents do not read the batch, and hold zeros beside numbers.
    "linear": lambda p, b: -(jax.nn.relu(b["x"] * p["w"]) @ p["w"]).mean(),
    "huber": lambda p, b: optax.huber_loss(predicted(p, b), b["y"]).mean(),
    "hinge": lambda p, b: optax.hinge_loss(predicted(p, b), b["y"]).mean(),
    "reduced": lambda p, b: replicator.all_reduce(losses(p, b).mean()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_mean_over_examples_is_not_warned_of(name):
    assert found(RIGHT[name]) is None


def test_gradients_that_the_user_reduced_are_not_warned_of():
    assert found(RIGHT["mean"], lambda grads: jax.lax.pmean(grads, "replica")) is None


def test_microbatches_do_not_matter():
    assert found(RIGHT["mean"], accumulate=2) is None
    assert "sum" in found(WRONG["sum"][0], accumulate=2)


def test_a_local_sum_is_not_warned_of():
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def loss(params, batch):
        total = (losses(params, batch) * batch["mask"]).sum()
        return replicator.LocalSum(total, batch["mask"].sum())

    def step_fn(state, batch):
        mean, grads = replicator.value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(
            grads, state["opt"], state["params"], count=mean.weight
        )
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    def init_fn(key):
        params = init_params(key)
        return {"params": params, "opt": optimizer.init(params)}

    assert warned(rep, step_fn, init_fn) is None


def test_a_step_for_one_number_of_examples_is_not_judged():
    assert found(lambda p, b: losses(p, b).reshape(8).sum()) is None


def test_a_long_program_is_not_judged(monkeypatch):
    monkeypatch.setattr(example_means, "MOST_EQUATIONS", 3)
    assert found(WRONG["sum"][0]) is None


def test_one_replica_is_not_judged():
    rep = replicas(1)
    init_fn, step_fn = trainer(
        rep.wrap_optimizer(optax.sgd(0.1)), lambda p, b: losses(p, b).sum(), init_params
    )
    assert warned(rep, step_fn, init_fn) is None
