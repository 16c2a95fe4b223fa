"""Run-ahead: steps in flight are bounded, on arrays of real programs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from replicator.engine.run_ahead import RunAhead, is_under_way
from replicator.errors import ArgumentError


@pytest.fixture
def slow_step(mesh):
    """Return a step of some 10 ms on eight devices that meet in a collective."""

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P())
    def per_replica(x):
        def body(_, y):
            return jnp.sin(y @ y)

        y = jax.lax.fori_loop(0, 20, body, x)
        return x + 1.0, jax.lax.pmean(y.sum(), "replica")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(x):
        x, total = per_replica(x)
        return x, {"total": total}

    state = jax.device_put(jnp.zeros((128, 128)), jax.sharding.NamedSharding(mesh, P()))
    state, metrics = step(state)
    metrics["total"].block_until_ready()
    return step, state


def most_unfinished(step, state, after_dispatch, *, steps):
    """Count, after each dispatch, the steps whose result is not there yet."""
    totals, most = [], 0
    for _ in range(steps):
        state, metrics = step(state)
        totals.append(metrics["total"])
        most = max(most, sum(not total.is_ready() for total in totals))
        after_dispatch(metrics)
    jax.block_until_ready(totals)
    return most


def test_a_naive_loop_runs_away(slow_step):
    # The control of the next test. At 16 in flight it does not abort (facts).
    assert most_unfinished(*slow_step, lambda metrics: None, steps=16) > 4


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_no_more_steps_than_the_limit_are_in_flight(slow_step, limit):
    run_ahead = RunAhead(limit)
    assert most_unfinished(*slow_step, run_ahead.admit, steps=40) <= limit
    assert run_ahead.in_flight == limit - 1


def test_on_cpu_no_more_than_16_steps_are_in_flight(slow_step):
    assert most_unfinished(*slow_step, RunAhead(1000).admit, steps=24) <= 16


def test_outputs_that_are_no_arrays_are_not_waited_for():
    run_ahead = RunAhead(1)
    run_ahead.admit({"loss": 0.5})
    assert run_ahead.in_flight == 0


def test_the_limit_is_at_least_one():
    with pytest.raises(ArgumentError) as caught:
        RunAhead(0)
    assert str(caught.value) == (
        "`max_in_flight` must be at least 1, got 0. Use 4, or 1 to wait for every step."
    )


def test_a_step_is_under_way_until_its_outputs_are_there(slow_step):
    step, state = slow_step
    seen = []
    # Of many, as a busy machine may finish one before this thread looks.
    for _ in range(50):
        state, metrics = step(state)
        seen.append(is_under_way({"by name": metrics}))
        metrics["total"].block_until_ready()
        assert not is_under_way({"by name": metrics})
    assert any(seen)


@pytest.mark.parametrize("outputs", [{}, {"none": {}}, {"loss": 1.0}, None])
def test_what_no_device_computes_is_not_under_way(outputs):
    assert not is_under_way(outputs)
