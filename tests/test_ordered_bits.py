"""`reduction="ordered"`: the same bits on any number of replicas."""

import inspect

import jax
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
    image_batch,
    init_conv,
    init_mlp,
    mlp_loss,
    norm_trainer,
    regression_batch,
    replicas,
    trainer,
    weighted_trainer,
)

NETWORKS = {
    "mlp": (mlp_loss, init_mlp, regression_batch),
    "conv": (conv_loss, init_conv, image_batch),
}


def ten_steps(network, n, k):
    """Train ten Adam steps on n replicas at k microbatches; return the state."""
    loss_fn, init_params, make_batch = NETWORKS[network]
    rep = replicas(n, reduction="ordered")
    init_fn, step_fn = trainer(rep.wrap_optimizer(adam()), loss_fn, init_params)
    step, state = rep.compile(step_fn, accumulate=k), rep.init(init_fn)
    for seed in range(10):
        state, _ = step(state, make_batch(32, seed=seed))
    return jax.device_get(state)


@pytest.mark.parametrize("network", NETWORKS)
def test_eight_blocks_give_the_same_bits_however_they_are_cut(network):
    expected = ten_steps(network, 8, 1)
    assert_equal_bits(ten_steps(network, 4, 2), expected)
    assert_equal_bits(ten_steps(network, 2, 4), expected)


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
