"""`debug=True`: one replica, the whole batch, concrete values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import replicator
from replicator import PerReplica
from replicator.errors import ArgumentError, StateError
from tests.steps import (
    assert_close,
    dropout_trainer,
    params_after,
    regression_batch,
    replicas,
    trainer,
    weighted_trainer,
)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_it_agrees_with_the_compiled_step(accumulate):
    rep, batch = replicas(2), regression_batch()
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    found, expected = (
        params_after(
            rep.compile(step_fn, accumulate=accumulate, debug=debug),
            rep.init(init_fn),
            batch,
        )
        for debug in (True, False)
    )
    assert_close(found, expected)


def test_random_keys_agree_with_the_compiled_step():
    rep, batch, key = replicas(2), regression_batch(), jax.random.key(1)
    init_fn, step_fn = dropout_trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    found, expected = (
        params_after(
            rep.compile(step_fn, debug=debug), rep.init(init_fn), batch, key=key
        )
        for debug in (True, False)
    )
    assert_close(found, expected)


def test_metrics_agree_with_the_compiled_step():
    rep, batch = replicas(2), regression_batch()
    batch["mask"] = (np.arange(16) < 11).astype(np.float32)
    init_fn, step_fn = weighted_trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    found, expected = (
        rep.compile(step_fn, accumulate=2, debug=debug)(rep.init(init_fn), batch)[1]
        for debug in (True, False)
    )
    assert_close(found, expected)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("reduction", ["fast", "ordered"])
def test_the_step_sees_concrete_values_of_the_whole_batch(accumulate, reduction):
    rep, seen = replicas(8, reduction=reduction), []
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def step_fn(state, batch):
        seen.append((float(batch["y"].sum()), len(batch["y"]), float(state["w"])))
        updates, opt = optimizer.update(jnp.ones(()), state["opt"])
        return {"w": state["w"] + updates, "opt": opt}, {}

    def init_fn(key):
        return {"w": jnp.ones(()), "opt": optimizer.init(jnp.ones(()))}

    step = rep.compile(step_fn, accumulate=accumulate, debug=True)
    state, _ = step(rep.init(init_fn), {"y": np.arange(16, dtype=np.float32)})
    assert seen == [(120.0, 16, 1.0)]
    np.testing.assert_allclose(state["w"], 0.9)


def test_collectives_act_as_one_replica():
    def step_fn(state, batch):
        assert replicator.num_replicas() == 1
        assert int(replicator.replica_id()) == 0
        return {"sum": replicator.all_reduce(batch["x"].sum(), "sum")}, {}

    step = replicas(8).compile(step_fn, debug=True)
    state, _ = step({"sum": jnp.zeros(())}, {"x": np.ones(16, np.float32)})
    assert float(state["sum"]) == 16


def test_nothing_is_donated():
    rep = replicas(8)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    step, state = rep.compile(step_fn, debug=True), rep.init(init_fn)
    step(state, regression_batch())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_placed_batches_feed_it():
    rep, batch = replicas(8), regression_batch()
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    step = rep.compile(step_fn, accumulate=2, debug=True)
    options = replicator.InputOptions(accumulate=2, remainder="refuse")
    with rep.batches([batch], options) as batches:
        found, _ = step(rep.init(init_fn), next(batches))
    assert_close(found["params"], params_after(step, rep.init(init_fn), batch))


def test_it_trains_in_the_loop():
    seen = []

    def run(debug):
        rep = replicas(8)
        init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))

        def watched(state, batch):
            seen.append(isinstance(batch["y"], jax.core.Tracer))
            return step_fn(state, batch)

        data = [regression_batch()]
        return rep.run(
            watched, data, init_fn=init_fn, steps=2, debug=debug, display=False
        )

    result = run(debug=True)
    assert seen == [False, False]
    assert_close(result.state["params"], run(debug=False).state["params"])


@pytest.mark.parametrize("failure", [AssertionError("mine"), TypeError("mine")])
def test_a_step_that_fails_in_a_run_has_run_once(failure):
    rep, calls = replicas(1), []
    init_fn, _ = trainer(rep.wrap_optimizer(optax.sgd(0.1)))

    def step_fn(state, batch):
        calls.append(batch)
        raise failure

    with pytest.raises(type(failure), match="mine"):
        rep.run(
            step_fn,
            [regression_batch()],
            init_fn=init_fn,
            steps=1,
            debug=True,
            display=False,
        )
    assert len(calls) == 1


def test_updates_in_a_scan_tell_their_norm_in_a_run():
    rep = replicas(1)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def step_fn(state, batch):
        def update(opt, grads):
            return optimizer.update(grads, opt)[::-1]

        return jax.lax.scan(update, state, batch)[0], {}

    found, expected = (
        rep.run(
            step_fn,
            [np.ones((2, 4), np.float32)],
            init_fn=lambda key: optimizer.init(jnp.zeros(4)),
            steps=1,
            debug=debug,
            display=False,
        ).metrics["gradient_norm"]
        for debug in (True, False)
    )
    assert found == expected == 2


def test_a_numpy_batch_of_float64_is_seen_as_the_compiled_step_would_see_it():
    dtypes = []

    def step_fn(state, batch):
        dtypes.append(batch["x"].dtype)
        return state, {}

    for debug in (True, False):
        step = replicas(8).compile(step_fn, debug=debug)
        step({"a": jnp.ones(())}, {"x": np.ones(8, np.float64)})
    assert dtypes[0] == dtypes[1]


def test_per_replica_leaves_are_refused():
    rep = replicas(8)

    def init_fn(key):
        return {"own": PerReplica(jnp.zeros(()))}

    step = rep.compile(lambda state, batch: (state, {}), debug=True)
    with pytest.raises(ArgumentError, match="`PerReplica` leaves, got `own`"):
        step(rep.init(init_fn), regression_batch())


def test_another_state_structure_is_refused():
    step = replicas(8).compile(lambda state, batch: ({}, {}), debug=True)
    with pytest.raises(StateError, match="`a` is missing"):
        step({"a": jnp.ones(())}, regression_batch())


@pytest.mark.parametrize(
    "options", [{"steps_per_call": 2}, {"checks": checkify.user_checks}]
)
def test_what_needs_compiling_is_refused(options):
    with pytest.raises(ArgumentError, match="`debug` must be False with"):
        replicas(8).compile(lambda state, batch: (state, {}), debug=True, **options)
