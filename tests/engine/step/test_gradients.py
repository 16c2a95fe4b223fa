"""Sums of losses are exact where replicas are uneven and speak to each other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import replicator
from replicator import (
    LocalSum,
    all_reduce,
    global_loss,
    strategies,
    value_and_grad,
    wrap_optimizer,
)
from replicator.errors import ArgumentError
from tests.steps import FEATURES, assert_close, regression_batch, replicas

CUTS = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2)]


def uneven_batch(k=1, examples=16):
    """Return float64 examples of which each block of a cut has another number."""
    batch = jax.tree.map(lambda x: x.astype(np.float64), regression_batch(examples))
    microbatch = np.arange(examples) % (examples // k)
    mask = (microbatch < 5) | (microbatch == 7)
    return {**batch, "mask": mask.astype(np.float64)}


def batch_norm(h, mask):
    """Normalise over the real examples of all replicas."""
    count = all_reduce(mask.sum(), "sum")
    mean = all_reduce((h * mask[:, None]).sum(0), "sum") / count
    apart = h - mean[None]
    var = all_reduce((apart**2 * mask[:, None]).sum(0), "sum") / count
    return apart * lax.rsqrt(var + 1e-3)[None]


def losses(w, batch):
    y = jnp.tanh(batch_norm(batch["x"] @ w, batch["mask"])).sum(1)
    return (y - batch["y"]) ** 2 * batch["mask"]


def local_sum(w, batch):
    return LocalSum(losses(w, batch).sum(), batch["mask"].sum())


def weights():
    return np.random.default_rng(3).normal(size=(FEATURES, 3))


def summing_trainer(loss_fn=local_sum):
    optimizer = wrap_optimizer(optax.sgd(1.0))

    def init_fn(key):
        w = jnp.asarray(weights())
        return {"params": w, "opt": optimizer.init(w)}

    def step_fn(state, batch):
        loss, grads = value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], count=loss.weight)
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    return init_fn, step_fn


def mean_over_microbatches(w, batch, k):
    """Return, on one device, the mean loss where each microbatch has its own norm."""
    cut = jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)
    parts = [jax.tree.map(lambda x, j=j: x[j], cut) for j in range(k)]
    return sum(losses(w, part).sum() for part in parts) / batch["mask"].sum()


@pytest.mark.parametrize(("n", "k"), CUTS)
def test_sums_are_exact_for_uneven_replicas_under_a_norm_over_all(n, k):
    with jax.enable_x64(True):
        rep, batch = replicas(n), uneven_batch(k)
        init_fn, step_fn = summing_trainer()
        state, metrics = rep.compile(step_fn, accumulate=k)(rep.init(init_fn), batch)
        expected = jax.value_and_grad(mean_over_microbatches)(weights(), batch, k)
        found = metrics["loss"], weights() - state["params"]
        assert_close(found, expected, rtol=1e-12)


@pytest.mark.parametrize(("n", "k"), [(2, 1), (2, 4), (8, 2)])
def test_a_term_that_is_not_per_example_counts_by_the_local_count(n, k):
    def decayed(w, batch):
        total, count = losses(w, batch).sum(), batch["mask"].sum()
        return LocalSum(total + count * (w**2).sum(), count)

    with jax.enable_x64(True):
        rep, batch = replicas(n), uneven_batch(k)
        init_fn, step_fn = summing_trainer(decayed)
        state, _ = rep.compile(step_fn, accumulate=k)(rep.init(init_fn), batch)
        expected = jax.grad(mean_over_microbatches)(weights(), batch, k) + 2 * weights()
        assert_close(weights() - state["params"], expected, rtol=1e-12)


@pytest.mark.parametrize("every", [2, 4])
def test_sums_add_up_in_a_loop_of_ones_own(every):
    with jax.enable_x64(True):
        rep, batch = replicas(2), uneven_batch(every)
        optimizer = wrap_optimizer(optax.sgd(1.0), accumulate=every)
        w = jnp.asarray(weights())

        def step_fn(state, batch):
            loss, grads = value_and_grad(local_sum)(state["w"], batch)
            updates, opt = optimizer.update(grads, state["opt"], count=loss.weight)
            return {"w": state["w"] + updates, "opt": opt}, {}

        step = rep.compile(step_fn)
        state = rep.init(lambda key: {"w": w, "opt": optimizer.init(w)})
        for part in range(every):
            own = jax.tree.map(
                lambda x, j=part: x.reshape(every, -1, *x.shape[1:])[j], batch
            )
            state, _ = step(state, own)
        expected = jax.grad(mean_over_microbatches)(weights(), batch, every)
        assert_close(weights() - state["w"], expected, rtol=1e-12)


def test_ordered_sums_have_the_bits_of_any_cut():
    def params(n, k):
        rep = replicas(n, reduction="ordered")
        optimizer = rep.wrap_optimizer(optax.sgd(0.1))

        def own(w, batch):
            total = ((batch["x"] @ w - batch["y"]) ** 2 * batch["mask"]).sum()
            return LocalSum(total, batch["mask"].sum())

        def step_fn(state, batch):
            loss, grads = value_and_grad(own)(state["w"], batch)
            updates, opt = optimizer.update(grads, state["opt"], count=loss.weight)
            return {"w": state["w"] + updates, "opt": opt}, {}

        w = jnp.ones(FEATURES)
        state = rep.init(lambda key: {"w": w, "opt": optimizer.init(w)})
        batch = jax.tree.map(lambda x: x.astype(np.float32), uneven_batch())
        state, _ = rep.compile(step_fn, accumulate=k)(state, batch)
        return np.asarray(state["w"])

    assert np.array_equal(params(2, 4), params(8, 1))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_batch_without_examples_moves_nothing_and_has_no_loss(n):
    rep = replicas(n)
    init_fn, step_fn = summing_trainer(
        lambda w, batch: LocalSum(
            ((batch["x"] @ w).sum(1) * batch["mask"]).sum(), batch["mask"].sum()
        )
    )
    batch = regression_batch() | {"mask": np.zeros(16, np.float32)}
    state = rep.init(init_fn)
    before = np.asarray(state["params"])
    state, metrics = rep.compile(step_fn)(state, batch)
    assert np.array_equal(state["params"], before)
    assert metrics["loss"] == 0


def test_auxiliary_values_come_back():
    def loss_fn(w, x):
        return LocalSum((w * x).sum(), len(x)), {"largest": x.max()}

    (loss, aux), grads = value_and_grad(loss_fn, has_aux=True)(2.0, jnp.arange(4.0))
    assert (loss.value, loss.weight, aux["largest"], grads) == (3, 4, 3, 6)


def test_a_sum_in_half_precision_comes_back_in_single():
    loss, grads = value_and_grad(lambda w: LocalSum(w.sum(), 3))(
        jnp.ones(3, jnp.float16)
    )
    assert loss.value.dtype == jnp.float32
    assert grads.dtype == jnp.float16


def test_sums_in_half_precision_are_divided_before_they_meet():
    # Twice 60,000 is above what float16 holds; 300 is not.
    optimizer = wrap_optimizer(optax.sgd(1.0))
    grads = jnp.asarray(60_000.0, jnp.float16)
    updates, _ = optimizer.update(grads, optimizer.init(grads), count=200)
    assert updates == -300


@pytest.mark.parametrize(
    ("returned", "rule"),
    [
        (lambda w: w, "`loss_fn` must return a `LocalSum`"),
        (lambda w: LocalSum(w[None], 1), "must return a scalar `value`"),
        (lambda w: LocalSum(w, jnp.ones(2)), "must return a scalar `count`"),
        (lambda w: LocalSum(1, 2), "must return a floating-point `value`"),
    ],
)
def test_what_is_no_sum_is_refused(returned, rule):
    with pytest.raises(ArgumentError, match=rule):
        value_and_grad(returned)(jnp.ones(()))


def test_a_missing_auxiliary_value_is_refused():
    with pytest.raises(ArgumentError, match=r"must return \(LocalSum, aux\)"):
        value_and_grad(lambda w: LocalSum(w, 1), has_aux=True)(1.0)


def test_weight_and_count_together_are_refused():
    optimizer = wrap_optimizer(optax.sgd(1.0))
    with pytest.raises(ArgumentError, match="must not be given together"):
        optimizer.update(1.0, optimizer.init(jnp.ones(())), weight=1, count=1)


# -------------------------------------------------------------------------- global loss


def on_all(fn, n, batch):
    """Return what `fn(w, batch)` is as the state of n replicas: proved equal on all."""
    rep = replicas(n)

    def step_fn(state, batch):
        return {"w": fn(state["w"], batch)}, {}

    state, _ = rep.compile(step_fn)({"w": jnp.asarray(weights())}, batch)
    return state["w"]


def whole_loss(w, batch):
    return losses(w, batch).sum() / batch["mask"].sum()


@pytest.mark.parametrize("n", [1, 2, 8])
def test_the_gradient_of_a_global_loss_is_that_of_one_device(n):
    with jax.enable_x64(True):
        found = on_all(jax.grad(global_loss(local_sum)), n, uneven_batch())
        expected = jax.grad(whole_loss)(weights(), uneven_batch())
        assert_close(found, expected, rtol=1e-12)


@pytest.mark.parametrize("outer", ["forward", "reverse"])
def test_a_global_loss_has_second_derivatives(outer):
    def curved(loss_fn):
        def product(w, batch):
            def grad(w):
                return jax.grad(loss_fn)(w, batch)

            if outer == "forward":
                return jax.jvp(grad, (w,), (jnp.ones_like(w),))[1]
            return jax.grad(lambda w: grad(w).sum())(w)

        return product

    with jax.enable_x64(True):
        found = on_all(curved(global_loss(local_sum)), 4, uneven_batch())
        expected = curved(whole_loss)(jnp.asarray(weights()), uneven_batch())
        assert_close(found, expected, rtol=1e-11)


def test_a_line_search_takes_a_global_loss():
    tx = optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=5))

    def minimized(loss_fn):
        def run(w, batch):
            def value_fn(w):
                return loss_fn(w, batch)

            value, grad = jax.value_and_grad(value_fn)(w)
            updates, _ = tx.update(
                grad, tx.init(w), w, value=value, grad=grad, value_fn=value_fn
            )
            return w + updates

        return run

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = on_all(minimized(global_loss(local_sum)), 4, uneven_batch())
        expected = minimized(whole_loss)(jnp.asarray(weights()), uneven_batch())
        assert_close(found, expected, rtol=1e-9)


def test_outside_any_replica_a_global_loss_is_the_mean():
    mean = global_loss(lambda w, x: LocalSum((w * x).sum(), len(x)))
    assert mean(2.0, jnp.arange(4.0)) == 3


def test_the_public_names_are_there():
    assert {"LocalSum", "value_and_grad", "global_loss"} <= set(replicator.__all__)


# ---------------------------------------------------------------- several denominators


def policy_and_value(w, batch):
    """Return losses and masks of two kinds, and what each counts."""
    seen = (batch["y"] > 0.3).astype(batch["x"].dtype)
    policy = jnp.tanh(batch["x"] @ w).sum(1) * batch["mask"]
    return (policy, batch["mask"], 1.0), (
        jnp.abs(batch["x"] @ w).sum(1) * seen,
        seen,
        0.5,
    )


def two_sums(w, batch):
    first, second = policy_and_value(w, batch)
    loss = LocalSum(first[0].sum(), first[1].sum())
    return loss + second[2] * LocalSum(second[0].sum(), second[1].sum())


def two_means(w, batch):
    parts = policy_and_value(w, batch)
    return sum(by * each.sum() / mask.sum() for each, mask, by in parts)


def parted_update(rep, k):
    """Return the loss, and the gradient that one update follows."""
    optimizer, w = rep.wrap_optimizer(optax.sgd(1.0)), jnp.asarray(weights())

    def step_fn(state, batch):
        loss, grads = value_and_grad(two_sums)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": state["params"] + updates, "opt": opt}, {"loss": loss}

    state = rep.init(lambda key: {"params": w, "opt": optimizer.init(w)})
    batch = uneven_batch(k, 32)
    state, metrics = rep.compile(step_fn, accumulate=k)(state, batch)
    return metrics["loss"], weights() - state["params"]


def expected_of_both(k):
    return jax.value_and_grad(two_means)(weights(), uneven_batch(k, 32))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 4), (2, 4), (4, 1), (8, 1), (8, 4)])
def test_two_sums_with_counts_of_their_own_are_exact(n, k):
    with jax.enable_x64(True):
        found = parted_update(replicas(n), k)
        assert_close(found, expected_of_both(k), rtol=1e-12)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(
    "options", [{"strategy": strategies.fsdp()}, {"reduction": "ordered"}]
)
def test_two_sums_are_exact_under_a_strategy_and_in_order(options, k):
    with jax.enable_x64(True):
        found = parted_update(replicas(4, **options), k)
        assert_close(found, expected_of_both(k), rtol=1e-12)


def test_two_sums_are_one_global_loss():
    with jax.enable_x64(True):
        found = on_all(jax.grad(global_loss(two_sums)), 4, uneven_batch(1, 32))
        assert_close(found, expected_of_both(1)[1], rtol=1e-12)


def test_sums_add_up_and_scale():
    a, b = LocalSum(1.0, 2), LocalSum(3.0, 4)
    assert (2 * (a + b) + a).parts == (LocalSum(2.0, 2), LocalSum(6.0, 4), a)
    assert (a + (a + b)).parts == (a, a, b)


def test_a_sum_and_a_number_do_not_add_up():
    number: Any = 1.0
    with pytest.raises(TypeError, match="unsupported operand"):
        LocalSum(1.0, 2) + number


def test_a_count_beside_those_of_several_sums_is_refused():
    optimizer = wrap_optimizer(optax.sgd(1.0))
    _, grads = value_and_grad(lambda w: LocalSum(w, 1) + LocalSum(w, 2))(1.0)
    with pytest.raises(ArgumentError, match="`count` must be left out"):
        optimizer.update(grads, optimizer.init(jnp.ones(())), count=3)


def test_each_sum_of_several_is_divided_by_its_count():
    optimizer = wrap_optimizer(optax.sgd(1.0))
    _, grads = value_and_grad(lambda w: LocalSum(6 * w, 3) + LocalSum(w, 2))(1.0)
    updates, _ = optimizer.update(grads, optimizer.init(jnp.ones(())))
    assert updates == -2.5


def test_gradients_of_integers_are_refused():
    with pytest.raises(ArgumentError, match="`params` must hold floating-point leaves"):
        value_and_grad(lambda w: LocalSum(1.0 * w["n"].sum(), 1))({"n": jnp.arange(3)})
