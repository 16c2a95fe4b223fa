"""A bad update changes nothing, on all replicas alike (fault matrix, row 10)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator.engine.compiled_step import CompiledStep, CompileOptions
from replicator.engine.step.loss_scale import DynamicLossScale
from replicator.engine.step.optimizer_state import optimizer_states
from replicator.engine.step.skipping import skip_bad_updates
from replicator.engine.step.state import first_run
from replicator.engine.step.transforms import (
    count_steps,
    lift,
    repeat_steps,
    report_norms,
)
from tests.steps import (
    adam,
    apply,
    assert_close,
    assert_equal_bits,
    mlp_loss,
    replicas,
    trainer,
)
from tests.steps import regression_batch as batch_of


def guarded(make, *, n=8, reduction="fast", wrap=None, steps_per_call=1, **options):
    """Return a state and a compiled step that skips bad updates."""
    rep = replicas(n, reduction=reduction)
    init_fn, step_fn = make(rep.wrap_optimizer(adam(), **(wrap or {})))
    state = first_run(init_fn, rep.layout, seed=0).born()
    state = dataclasses.replace(state, skipped=jnp.zeros((), jnp.int32))
    update = count_steps(lift(step_fn, reduction=reduction, measures=True, **options))
    step = skip_bad_updates(update, reduction=reduction)
    step = report_norms(step, among_metrics=True)
    if steps_per_call > 1:
        step = repeat_steps(step)
    compiled = CompileOptions(
        steps_per_call=steps_per_call, reduction=reduction, **options
    )
    return state, CompiledStep(step, rep.layout, compiled)


def bad_batch(*, example, number=np.nan):
    """Return a batch with a bad number for one replica of eight (2 examples each)."""
    batch = batch_of(seed=9)
    batch["x"][example, 1] = number
    return batch


def of_user(state):
    return jax.device_get(state.user)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("example", [0, 7, 15])
def test_one_replica_with_a_bad_number_leaves_the_state_as_it_was(example, number):
    state, step = guarded(trainer)
    state, _ = step(state, batch_of())
    before = of_user(state)
    state, metrics = step(state, bad_batch(example=example, number=number))
    assert_equal_bits(of_user(state), before)
    assert (int(state.step), int(state.skipped)) == (2, 1)
    assert float(metrics["skipped_updates"]) == 1


def test_every_replica_holds_the_same_bits_after_a_skip():
    state, step = guarded(trainer)
    state, _ = step(state, bad_batch(example=3))
    for leaf in jax.tree.leaves(state):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert all(np.array_equal(first, other) for other in others)


def test_good_updates_are_those_of_a_run_that_skips_nothing():
    state, step = guarded(trainer)
    rep = replicas(8)
    init_fn, step_fn = trainer(rep.wrap_optimizer(adam()))
    control = first_run(init_fn, rep.layout, seed=0).born()
    plain = CompiledStep(count_steps(lift(step_fn)), rep.layout, CompileOptions())
    for seed in range(3):
        state, _ = step(state, batch_of(seed=seed))
        control, _ = plain(control, batch_of(seed=seed))
    # Not bit for bit: XLA may fuse an update with what chooses whether it is kept.
    assert_close(of_user(state), of_user(control))


def test_after_a_skip_training_goes_on_as_if_the_batch_had_not_been():
    state, step = guarded(trainer)
    control, _ = guarded(trainer)
    for batch in (batch_of(seed=0), bad_batch(example=5), batch_of(seed=1)):
        state, _ = step(state, batch)
    for batch in (batch_of(seed=0), batch_of(seed=1)):
        control, _ = step(control, batch)
    assert_equal_bits(of_user(state), of_user(control))


def finite_loss(optimizer):
    """Report a loss that stays finite where the gradient does not."""
    init_fn, step_fn = trainer(optimizer)

    def step(state, batch):
        after, metrics = step_fn(state, batch)
        return after, {"loss": jnp.nan_to_num(metrics["loss"])}

    return init_fn, step


def test_a_bad_gradient_is_seen_behind_a_finite_loss():
    state, step = guarded(finite_loss)
    before = of_user(state)
    state, metrics = step(state, bad_batch(example=3))
    assert_equal_bits(of_user(state), before)
    assert np.isnan(metrics["gradient_norm"])


def without_optimizer(_):
    """Sum up, from an infinite start: a state that no optimizer looks after."""

    def step(state, batch):
        total = replicator.all_reduce(batch["x"].sum(), "sum")
        return {**state, "sum": state["sum"] + total}, {}

    return lambda key: {"sum": jnp.zeros(()), "best": jnp.inf}, step


def test_a_state_without_an_optimizer_is_watched_itself():
    state, step = guarded(without_optimizer)
    state, _ = step(state, bad_batch(example=3))
    assert float(state.user["sum"]) == 0.0
    assert int(state.skipped) == 1


def test_infinity_that_was_there_before_is_not_bad():
    state, step = guarded(without_optimizer)
    state, _ = step(state, batch_of())
    assert int(state.skipped) == 0


def with_own_leaf(_):
    def step(state, batch):
        own = replicator.PerReplica(state["own"].value + batch["x"].sum(), "sum")
        return {"own": own}, {"seen": replicator.PerReplica(batch["y"].sum())}

    own = replicator.PerReplica(jnp.zeros(()), "sum")
    return lambda key: {"own": own}, step


@pytest.mark.parametrize("leaf", ["x", "y"])
def test_what_is_bad_on_one_replica_alone_is_skipped_by_all(leaf):
    state, step = guarded(with_own_leaf)
    batch = batch_of()
    batch[leaf][3] = np.nan
    state, _ = step(state, batch)
    assert not np.asarray(state.user["own"].value).any()
    assert int(state.skipped) == 1


def scaled(optimizer):
    def loss_fn(params, batch, opt):
        return replicator.scale_loss(mlp_loss(params, batch), opt)

    init_fn, _ = trainer(optimizer)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch, state["opt"])
        return apply(optimizer, state, grads), {"loss": loss}

    return init_fn, step


def test_a_loss_scale_comes_down_all_the_same():
    state, step = guarded(scaled, wrap={"loss_scale": DynamicLossScale()})
    [before] = optimizer_states(of_user(state))
    state, _ = step(state, bad_batch(example=3))
    [after] = optimizer_states(of_user(state))
    assert after.scale.value < before.scale.value
    assert_equal_bits(after.inner, before.inner)


@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"reduction": "ordered"}, {"steps_per_call": 2}]
)
def test_it_holds_under_accumulation_ordered_bits_and_scans(options):
    state, step = guarded(trainer, **options)
    before = of_user(state)
    batch = bad_batch(example=3)
    if options.get("steps_per_call"):
        batch = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), batch)
    state, _ = step(state, batch)
    assert_equal_bits(of_user(state), before)
    assert int(state.skipped) == options.get("steps_per_call", 1)


def test_with_an_optimizer_a_guard_sends_nothing_more():
    def sent(make_step):
        rep = replicas(8)
        init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
        state = first_run(init_fn, rep.layout, seed=0).born()
        update = make_step(count_steps(lift(step_fn, measures=True)))
        step = CompiledStep(
            report_norms(update, among_metrics=True), rep.layout, CompileOptions()
        )
        return step.lower(state, batch_of()).as_text().count("all_reduce")

    assert sent(skip_bad_updates) == sent(lambda update: update)
