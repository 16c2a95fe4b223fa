"""The smallest number of microbatches that fits is found; none above it is compiled."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator.engine.auto_microbatch import find_accumulate, fit_accumulate
from replicator.engine.memory import MemoryNeed, larger_divisors, state_bytes
from replicator.engine.sharded_step import CompileOptions
from replicator.engine.step.state import first_run
from replicator.errors import ArgumentError, BatchError, DeviceMemoryError
from tests.steps import replicas, trainer

DIVISORS = (1, *larger_divisors(256, 1))
FULL = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"
)


@pytest.mark.parametrize("smallest", DIVISORS)
def test_the_smallest_that_fits_is_found_and_no_larger_one_compiled(smallest):
    asked = []

    def compile_need(k):
        asked.append(k)
        return needs(0 if k >= smallest else 10**6)(1)

    found = find_accumulate(compile_need, runs, replica_batch=256, limit_bytes=1000)
    assert found == smallest
    assert asked == [k for k in DIVISORS if k <= smallest]


def runs(k):
    """Have room for any number of microbatches."""


def needs(total_at_one, fixed=100):
    def compile_need(k):
        return MemoryNeed(
            arguments_bytes=fixed,
            outputs_bytes=0,
            temporaries_bytes=total_at_one // k,
        )

    return compile_need


def test_what_compiled_programs_say_is_held_against_the_limit():
    found = find_accumulate(needs(6400), runs, replica_batch=64, limit_bytes=1000)
    assert found == 8


def test_a_lack_of_memory_while_compiling_counts_as_too_big():
    def compile_need(k):
        if k < 4:
            raise FULL
        return needs(0)(k)

    found = find_accumulate(compile_need, runs, replica_batch=8, limit_bytes=1000)
    assert found == 4


def test_a_lack_of_memory_while_running_does_too():
    def run_once(k):
        if k < 4:
            raise FULL

    found = find_accumulate(lambda k: None, run_once, replica_batch=8, limit_bytes=None)
    assert found == 4


@pytest.mark.parametrize("where", ["compile_need", "run_once"])
def test_any_other_failure_is_raised(where):
    def fail(k):
        raise ZeroDivisionError

    given = {"compile_need": needs(0), "run_once": runs} | {where: fail}
    with pytest.raises(ZeroDivisionError):
        find_accumulate(**given, replica_batch=8, limit_bytes=1000)


def test_where_nothing_fits_it_says_what_was_needed():
    message = (
        "`auto_microbatch` must find microbatches that fit into each device's memory, "
        "got none: with 4 of them the step needs 116 bytes (temporaries 16 bytes, "
        "state and batch 100 bytes) and there are 50 bytes. Use a smaller model, or a "
        "smaller global batch on more replicas."
    )
    with pytest.raises(DeviceMemoryError, match=re.escape(message)):
        find_accumulate(needs(64), runs, replica_batch=4, limit_bytes=50)


def wide_trainer(optimizer):
    """Train with activations that are large beside the state: 4 KiB an example."""

    def loss_fn(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["w"])
        for _ in range(3):
            hidden = jnp.tanh(hidden * hidden)
        return (hidden.sum(1) - batch["y"]).mean()

    def init(key):
        return {"w": jnp.ones((4, 1024)) / 100}

    return trainer(optimizer, loss_fn, init)


def wide_step(rep):
    return wide_trainer(rep.wrap_optimizer(optax.sgd(0.1)))


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"steps_per_call": 2}, marks=pytest.mark.slow)]
)
def test_a_real_step_gets_as_many_microbatches_as_its_limit_asks_for(options):
    rep = replicas(2)
    init_fn, step_fn = wide_step(rep)
    found = fit_accumulate(
        step_fn,
        rep.layout,
        CompileOptions(**options),
        make_state=lambda: first_run(init_fn, rep.layout, seed=0).born(),
        batch={"x": np.ones((24, 4), np.float32), "y": np.ones(24, np.float32)},
        limit_bytes=80_000,  # the state takes 16 kB, each example up to 16 kB more
    )
    assert found in (2, 3, 4, 6)


def test_the_copy_of_a_save_takes_its_part_of_the_limit():
    rep = replicas(2)
    init_fn, step_fn = wide_step(rep)
    make_state = first_run(init_fn, rep.layout, seed=0).born

    def fitted(limit_bytes, *, copies):
        return fit_accumulate(
            step_fn,
            rep.layout,
            CompileOptions(state_copies=copies),
            make_state=make_state,
            batch={"x": np.ones((24, 4), np.float32), "y": np.ones(24, np.float32)},
            limit_bytes=limit_bytes,
        )

    room = 80_000 + state_bytes(make_state())
    assert fitted(room, copies=1) == fitted(80_000, copies=0)
    assert fitted(room, copies=0) < fitted(80_000, copies=0)


def test_a_batch_that_does_not_divide_is_refused():
    rep = replicas(2)
    init_fn, step_fn = wide_step(rep)
    with pytest.raises(BatchError, match="must divide evenly over 2 replicas"):
        fit_accumulate(
            step_fn,
            rep.layout,
            CompileOptions(),
            make_state=lambda: first_run(init_fn, rep.layout, seed=0).born(),
            batch={"x": np.ones((3, 4), np.float32)},
        )


def test_a_run_chooses_its_microbatches_and_trains_as_with_one(tmp_path):
    batch = {"x": np.ones((24, 4), np.float32), "y": np.ones(24, np.float32)}
    rep = replicas(2)
    init_fn, step_fn = wide_step(rep)

    def run(**options):
        return rep.run(
            step_fn,
            [batch],
            init_fn=init_fn,
            steps=3,
            display=False,
            directory=tmp_path,
            **options,
        )

    found = run(auto_microbatch=True, memory_limit_bytes=80_000)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["arguments"]["accumulate"] in (2, 3, 4, 6)
    np.testing.assert_allclose(
        found.state["params"]["w"], run().state["params"]["w"], rtol=1e-5
    )


def test_a_dataset_that_can_be_read_once_is_refused():
    rep = replicas(2)
    init_fn, step_fn = wide_step(rep)
    batches = iter([{"x": np.ones((4, 4), np.float32), "y": np.ones(4, np.float32)}])
    with pytest.raises(ArgumentError, match="must be one that can be read again"):
        rep.run(step_fn, batches, init_fn=init_fn, steps=1, auto_microbatch=True)
