"""`reduction="ordered"`: the same bits while replicas × microbatches is the same."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import replicator
from replicator import Mean
from replicator.errors import ArgumentError
from tests.steps import (
    adam,
    apply,
    assert_equal_bits,
    conv_loss,
    cross_entropy,
    image_batch,
    init_conv,
    init_mlp,
    mlp_loss,
    norm_trainer,
    normals,
    regression_batch,
    replicas,
    trainer,
    weighted_trainer,
)

WIDTH = 8


def init_attention(key):
    weights = {name: normals(WIDTH, WIDTH, seed=n) / 3 for n, name in enumerate("qkvo")}
    head, embedding = normals(WIDTH, 3, seed=9), normals(4, WIDTH, seed=8)
    return {**weights, "head": head / 3, "embedding": embedding}


def attention_loss(params, batch):
    """Let the rows of each image attend to each other."""
    x = batch["image"][..., 0] @ params["embedding"]
    query, key, value = (x @ params[name] for name in "qkv")
    scores = jnp.einsum("ntd,nsd->nts", query, key) / math.sqrt(WIDTH)
    mixed = jnp.einsum("nts,nsd->ntd", jax.nn.softmax(scores), value)
    y = jnp.tanh(x + mixed @ params["o"])
    return cross_entropy(params, y[:, None], batch["label"])


NETWORKS = {
    "mlp": (mlp_loss, init_mlp, regression_batch),
    "conv": (conv_loss, init_conv, image_batch),
    "attention": (attention_loss, init_attention, image_batch),
}


@functools.cache
def ten_steps(network, n, k):
    """Train ten Adam steps on n replicas at k microbatches; return the state."""
    loss_fn, init_params, make_batch = NETWORKS[network]
    rep = replicas(n, reduction="ordered")
    init_fn, step_fn = trainer(rep.wrap_optimizer(adam()), loss_fn, init_params)
    step, state = rep.compile(step_fn, accumulate=k), rep.init(init_fn)
    for seed in range(10):
        state, _ = step(state, make_batch(32, seed=seed))
    return jax.device_get(state)


@pytest.mark.parametrize(
    "network", ["mlp", "conv", pytest.param("attention", marks=pytest.mark.slow)]
)
def test_eight_blocks_give_the_same_bits_however_they_are_cut(network):
    expected = ten_steps(network, 8, 1)
    assert_equal_bits(ten_steps(network, 4, 2), expected)
    assert_equal_bits(ten_steps(network, 2, 4), expected)


@pytest.mark.parametrize("network", ["mlp", "conv"])
def test_one_replica_has_the_same_bits_without_attention(network):
    assert_equal_bits(ten_steps(network, 1, 8), ten_steps(network, 8, 1))


def test_one_replica_has_the_same_values_with_attention():
    # Its bits are those of another program: nobody promises them. Adam would make much
    # of the last ones.
    def one_step(n):
        rep = replicas(n, reduction="ordered")
        optimizer = rep.wrap_optimizer(optax.sgd(0.1))
        init_fn, step_fn = trainer(optimizer, attention_loss, init_attention)
        step = rep.compile(step_fn, accumulate=8 // n)
        return jax.device_get(step(rep.init(init_fn), image_batch(32))[0]["params"])

    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, one_step(1), one_step(8))


def test_another_number_of_blocks_adds_up_otherwise():
    expected = ten_steps("mlp", 4, 4)
    assert_equal_bits(ten_steps("mlp", 8, 2), expected)
    with pytest.raises(AssertionError):
        assert_equal_bits(ten_steps("mlp", 8, 1), expected)


def test_the_fast_reduction_does_not_promise_that():
    # Otherwise the test above would say nothing.
    def bits(n, k, reduction):
        rep = replicas(n, reduction=reduction)
        init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
        step, state = rep.compile(step_fn, accumulate=k), rep.init(init_fn)
        for seed in range(10):
            state, _ = step(state, regression_batch(32, seed=seed))
        return jax.device_get(state["params"])

    with pytest.raises(AssertionError):
        assert_equal_bits(bits(8, 1, "fast"), bits(2, 4, "fast"))
    assert_equal_bits(bits(8, 1, "ordered"), bits(2, 4, "ordered"))


def test_weights_are_added_in_order_too():
    def weighted(n, k):
        rep = replicas(n, reduction="ordered")
        init_fn, step_fn = weighted_trainer(rep.wrap_optimizer(optax.sgd(0.1)))
        batch = regression_batch(32)
        batch["mask"] = (batch["y"] > -0.5).astype("float32") * 0.3
        step, state = rep.compile(step_fn, accumulate=k), rep.init(init_fn)
        return jax.device_get(step(state, batch)[0])

    expected = weighted(8, 1)
    assert_equal_bits(weighted(2, 4), expected)


def test_a_step_without_an_optimizer_needs_no_blocks():
    rep = replicas(8, reduction="ordered")
    step = rep.compile(lambda state, batch: (state, {"y": batch["y"].mean()}))
    batch = regression_batch()
    _, metrics = step({"w": 1.0}, batch)
    assert abs(float(metrics["y"]) - batch["y"].mean()) < 1e-6


def own_collective(state, batch):
    mean = lax.pmean(batch["x"].mean(), "replica")
    return {**state, "seen": mean}, {}


def lineno(function, text):
    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if text in line)


def test_a_collective_of_the_steps_own_is_refused_with_its_line():
    with pytest.raises(ArgumentError) as found:
        replicas(8, reduction="ordered").compile(own_collective)(
            {"w": 1.0, "seen": 0.0}, regression_batch()
        )
    place = f"{__file__}:{lineno(own_collective, 'lax.pmean')} in own_collective"
    assert f"got 'ordered' and `psum` at {place}." in str(found.value)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_cross_replica_batch_norm_is_refused(accumulate):
    rep = replicas(2, reduction="ordered")
    init_fn, step_fn = norm_trainer(
        rep.wrap_optimizer(adam()), lambda x: replicator.all_reduce(x)
    )
    with pytest.raises(ArgumentError, match="`reduction` must be 'fast' for a step"):
        rep.compile(step_fn, accumulate=accumulate)(rep.init(init_fn), image_batch())


def test_an_optimizer_wrapped_without_the_promise_is_refused():
    rep = replicas(2, reduction="ordered")
    init_fn, step_fn = trainer(replicator.wrap_optimizer(optax.sgd(0.1)))
    with pytest.raises(ArgumentError, match="`reduction` must be the same"):
        rep.compile(step_fn)(rep.init(init_fn), regression_batch())


def test_the_replica_id_and_declared_metrics_are_no_collectives():
    rep = replicas(2, reduction="ordered")
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        grads = jax.grad(mlp_loss)(state["params"], batch)
        return apply(optimizer, state, grads), {
            "mean": Mean(batch["y"].mean(), batch["y"].shape[0]),
            "id": replicator.replica_id(),
        }

    _, metrics = rep.compile(step_fn)(rep.init(init_fn), regression_batch())
    assert float(metrics["id"]) == 0.5
