"""A step of a run knows how many updates came before it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator.errors import ArgumentError
from replicator.hooks import Callback, every
from replicator.testing import assert_replica_invariant
from tests.steps import apply, mlp_loss, regression_batch, replicas, trainer

KINDS = {
    "plain": {},
    "microbatches": {"accumulate": 2},
    "many steps a call": {"steps_per_call": 2},
    "both": {"accumulate": 2, "steps_per_call": 2},
    "ordered": {"reduction": "ordered"},
    "debugged": {"debug": True},
    "left out": {"on_nonfinite": "skip"},
}


def numbered(optimizer):
    """Report the step's number, and train at the rate 1 / (number + 1)."""
    init_fn, _ = trainer(optimizer)

    @jax.jit
    def scaled(grads):
        rate = 1 / (replicator.step_number().astype(jnp.float32) + 1)
        return jax.tree.map(lambda g: g * rate.astype(g.dtype), grads)

    def step_fn(state, batch):
        number = replicator.step_number()
        grads = scaled(jax.grad(mlp_loss)(state["params"], batch))
        return apply(optimizer, state, grads), {
            "number": replicator.Max(number),
            "least": replicator.Max(-number),
        }

    return init_fn, step_fn


def run(n=2, *, steps=4, reduction="fast", **options):
    """Return the result, and the numbers that the steps reported."""
    rep, seen = replicas(n, reduction=reduction), []
    init_fn, step_fn = numbered(rep.wrap_optimizer(optax.sgd(0.1)))
    hook = Callback(
        lambda event: seen.append((event.metrics["number"], -event.metrics["least"])),
        every(n_steps=1),
    )
    result = rep.run(
        step_fn,
        [regression_batch()],
        init_fn=init_fn,
        steps=steps,
        hooks=[hook],
        display=False,
        **options,
    )
    return result, [tuple(map(int, pair)) for pair in seen]


@functools.cache
def run_of(kind, n=2):
    return run(n, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_it_counts_updates_from_zero(kind):
    _, seen = run_of(kind)
    assert seen == [(n, n) for n in range(4)]


@pytest.mark.parametrize("kind", ["microbatches", "many steps a call", "debugged"])
def test_what_follows_from_it_is_the_same_however_a_batch_is_cut(kind):
    expected, found = run_of("plain", n=1)[0].state, run_of(kind)[0].state
    np.testing.assert_allclose(
        found["params"]["w1"], expected["params"]["w1"], rtol=1e-5
    )


def test_it_goes_on_where_a_run_goes_on(tmp_path):
    run(steps=2, checkpoint_dir=tmp_path)
    _, seen = run(steps=4, checkpoint_dir=tmp_path)
    assert seen[-2:] == [(2, 2), (3, 3)]


def test_it_is_an_int32_scalar():
    def step_fn(state, batch):
        number = replicator.step_number()
        assert (number.dtype, number.shape) == (jnp.int32, ())
        return state, {}

    replicas(2).run(
        step_fn,
        [regression_batch()],
        init_fn=lambda key: {"a": jnp.zeros(())},
        steps=1,
        display=False,
    )


def test_a_step_that_asks_for_it_is_checked_against_the_law():
    init_fn, step_fn = numbered(replicas(2).wrap_optimizer(optax.sgd(0.1)))
    report = assert_replica_invariant(
        step_fn,
        init_fn,
        regression_batch(),
        replicas=(1, 2),
        accumulate=(1, 2),
        at_steps=(0, 2),
    )
    assert "float64 trajectory" in str(report)


@pytest.mark.parametrize("debug", [False, True])
def test_a_loop_of_ones_own_has_none(debug):
    rep = replicas(2)
    init_fn, step_fn = numbered(rep.wrap_optimizer(optax.sgd(0.1)))
    step = rep.compile(step_fn, debug=debug)
    with pytest.raises(ArgumentError, match="keep an int32 counter in the state"):
        step(rep.init(init_fn), regression_batch())
