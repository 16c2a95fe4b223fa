"""A learner on a replay table: probabilities come, and priorities go back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicator
import replicator.launchpad_bridge as lp
from replicator import strategies
from tests.launchpad_bridge.learner import replay

FSDP = strategies.fsdp(whole_below_bytes=0)


@functools.cache
def alone():
    return replay.learnt()


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 2, "accumulate": 2, "samples_per_call": 2},
        {"replicas": 2},
        {"replicas": 2, "strategy": FSDP},
        {"replicas": 2, "strategy": FSDP, "accumulate": 2},
        {"replicas": 2, "steps_per_call": 2, "samples_per_call": 4},
    ],
)
def test_rows_get_their_priorities_and_the_learner_learns_as_with_one_replica(options):
    result, (ids, values) = replay.learnt(**options)
    np.testing.assert_array_equal(values, ids + 0.5)
    one, told = alone()
    if options.get("samples_per_call", 1) == 1:  # else other draws
        np.testing.assert_array_equal(ids, told[0])
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
        jax.tree.map(close, one["variables"], result["variables"])


def test_a_policy_lag_leaves_out_of_samples_what_is_older_by_then():
    _, (ids, _) = replay.learnt(versions=(0, 5), max_policy_lag=1)
    of_updates = ids.reshape(4, 8)
    assert (of_updates[:2] < replay.ROWS // 2).any()
    assert (of_updates[2:] >= replay.ROWS // 2).all()


def test_hooks_and_records_get_the_mean_of_the_priorities():
    result, (_, values) = alone()
    assert len(values) == 4 * 8
    assert result["metrics"]["priority"] == values[-8:].mean()
    assert result["statistics"]["priorities"]["sent"] == 32


def test_priorities_of_a_narrow_type_come_as_they_were():
    def step_fn(state, batch):
        state, metrics = replay.step_fn(state, batch)
        narrow = metrics["priority"].value.astype(jnp.bfloat16)
        return state, metrics | {"priority": replicator.Concat(narrow)}

    _, (ids, values) = replay.learnt(step_fn=step_fn)
    np.testing.assert_array_equal(values, ids + 0.5)  # bfloat16 holds these


def test_rows_of_an_update_that_is_skipped_keep_only_what_is_not_finite():
    def step_fn(state, batch):
        state, metrics = replay.step_fn(state, batch)
        values = metrics["priority"].value
        bad = jnp.where(values == values.max(), jnp.nan, values)
        return state, metrics | {"priority": replicator.Concat(bad)}

    result, (ids, values) = replay.learnt(step_fn=step_fn, on_nonfinite="skip")
    np.testing.assert_array_equal(values, ids + 0.5)
    counts = result["statistics"]["priorities"]
    assert counts["nonfinite"] >= 4
    assert counts["sent"] == 32 - counts["nonfinite"]
    assert result["metrics"]["skipped_updates"] == 4


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ({}, "got none for 'priority'"),
        ({"priority": jnp.ones(())}, "got a .*Array.* for 'priority'"),
        (
            {"priority": replicator.Concat(jnp.ones((8, 2)))},
            r"got a Concat of float32\[8",
        ),
    ],
)
def test_a_metric_that_is_no_priority_of_each_example_is_refused(metrics, found):
    step = {"step_fn": lambda state, batch: (state, metrics)}
    found = f"one number per example, 8 here, {found}"
    with pytest.raises(lp.NodeFailedError, match=found):
        replay.learnt(**step)


def test_samples_without_keys_are_refused():
    table = lp.TrajectoryQueue(capacity=64)
    table.insert({"reward": np.ones(8)}, actor="by hand", version=0)
    program = replay.program_of(lp.Deferred(lambda: table))
    with pytest.raises(lp.NodeFailedError, match="got one whose samples have no keys"):
        lp.launch(program, "threads").wait(replay.TIMEOUT_S)
