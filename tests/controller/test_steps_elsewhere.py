"""The step of `rep.compile` on islands of other processes: bits of one process."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator import Replicator, controller, strategies
from replicator.errors import ArgumentError, IslandLostError
from tests.controller.test_process_islands import called, process_id

LIMIT_S = 120
BATCH = {"x": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)}
CASES = {
    "data_parallel": (strategies.data_parallel(), {}),
    "fsdp": (strategies.fsdp(whole_below_bytes=0), {"accumulate": 2}),
    "hybrid": (strategies.hybrid(shard=2, whole_below_bytes=0), {}),
    "several": (strategies.data_parallel(), {"steps_per_call": 2}),
}


def made(devices, strategy, **options):
    """Return a compiled step of noise and momentum, and its first state."""
    rep = Replicator(devices=devices, strategy=strategy)
    tx = rep.wrap_optimizer(optax.sgd(1e-2, momentum=0.9))

    def init_fn(key):
        params = {"w": jax.random.normal(key, (8, 4)), "b": jnp.zeros((1, 4))}
        return {"params": params, "opt": tx.init(params)}

    def step_fn(state, batch, key):
        def loss(params):
            noise = jax.random.normal(key, (1, 4))
            return (
                jnp.tanh(batch["x"] @ params["w"] + params["b"] + noise) ** 2
            ).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": replicator.all_reduce(value)}

    return rep.compile(step_fn, **options), rep.init(init_fn)


def bits(step, state, *, several=False):
    """Return the bits of state and metrics after three calls."""
    batch, key = BATCH, jax.random.key
    if several:
        batch = {"x": np.stack([BATCH["x"], BATCH["x"] + 0.1])}
    for n in range(3):
        keys = jax.random.split(key(n), 2) if several else key(n)
        state, metrics = step(state, batch, keys)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state, metrics))]


def held_on(pw, case, devices=4):
    strategy, options = CASES[case]
    several = "steps_per_call" in options
    on = pw.slice(devices)
    step, state = made(on.devices, strategy, **options)
    found = bits(pw.fn(step, on), state, several=several)
    wanted = bits(*made(jax.devices()[:devices], strategy, **options), several=several)
    return found == wanted


@pytest.fixture
def served():
    with (
        controller.IslandServer("unix:", devices=jax.devices()[:4]) as server,
        controller.connect([server.address], lost_after_s=300) as pw,
    ):
        yield pw


@pytest.mark.parametrize("case", ["data_parallel", "fsdp"])
def test_a_step_that_was_sent_has_equal_bits(served, case):
    assert held_on(served, case)


def test_a_step_that_reads_what_it_computes_is_refused_there(served):
    on = served.slice(4)
    rep = Replicator(devices=on.devices, strategy=strategies.fsdp())
    step = rep.compile(lambda state, batch: (state, {}), check_first_updates=True)
    with pytest.raises(ArgumentError, match="without `checks` and"):
        served.fn(step, on)({"w": np.ones(4, np.float32)}, BATCH)


@pytest.mark.slow
def test_steps_have_equal_bits_on_an_island_of_two_processes():
    # Of two numbers: gloo adds more in another order.
    with controller.start(devices=2, processes=2, lost_after_s=300) as pw:
        assert held_on(pw, "hybrid", 2)
        assert held_on(pw, "several", 2)


@pytest.mark.slow
def test_a_step_goes_on_where_its_slice_has_moved():
    strategy, _ = CASES["data_parallel"]
    with controller.start(devices=1, spares=1, lost_after_s=300) as pw:
        on = pw.slice(1)
        step, state = made(on.devices, strategy)
        kept = jax.tree.map(np.asarray, state)
        op, first = pw.fn(step, on), pw.fn(called(process_id), on)(np.ones(1))
        before, there = bits(op, state), pw.put(np.ones(1), on)
        os.kill(int(first.result(LIMIT_S)[0]), signal.SIGKILL)
        with pytest.raises(IslandLostError):
            there.result(LIMIT_S)
        assert bits(op, kept) == before
