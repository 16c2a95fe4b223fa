"""Memory errors say what needed how much, and what would fit."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from replicator.base.out_of_memory import is_out_of_memory, readable
from replicator.engine.memory import (
    MemoryNeed,
    larger_divisors,
    memory_limit_bytes,
    memory_need,
    out_of_memory,
    state_bytes,
)
from replicator.errors import DeviceMemoryError
from tests.steps import adam, regression_batch, replicas, trainer

GIB = 2**30
XLA_SAID = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Out of memory allocating 1600000000 bytes."
)


def need(temporaries=8 * GIB):
    return MemoryNeed(
        arguments_bytes=3 * GIB,
        outputs_bytes=2 * GIB,
        temporaries_bytes=temporaries,
        aliased_bytes=2 * GIB,
    )


def message(**given):
    arguments = {
        "need": need(),
        "limit_bytes": 8 * GIB,
        "accumulate": 1,
        "replica_batch": 12,
    }
    return str(out_of_memory(XLA_SAID, **{**arguments, **given}))


def test_it_says_what_is_needed_what_there_is_and_what_may_fit():
    assert message() == (
        "`accumulate` must make the step fit into each device's memory, got 1: it "
        "needs 11 GiB (temporaries 8 GiB, state and batch 3 GiB) and there are 8 GiB. "
        "Use `accumulate=4`, `accumulate=6` or `accumulate=12`, or let "
        "`auto_microbatch=True` find one."
    )


def test_without_a_program_it_says_what_xla_asked_for():
    text = message(need=None, limit_bytes=None)
    assert (
        "it needs a buffer of 1.49 GiB more than there is. Use `accumulate=2`" in text
    )


def test_where_no_microbatch_helps_it_says_so():
    text = message(limit_bytes=2 * GIB)
    assert text.endswith(
        "Use a smaller global batch, a smaller model or more replicas."
    )


def test_copy_of_a_save_counts_and_its_way_out_is_named():
    counted = dataclasses.replace(need(), copy_bytes=GIB)
    assert counted.total_bytes == need().total_bytes + GIB
    text = message(need=counted)
    assert "it needs 12 GiB (" in text
    assert "copy of the state in a save 1 GiB" in text
    assert text.endswith('`checkpoint_copy="host"` needs 1 GiB less.')


def test_state_of_a_device_is_its_shards():
    mesh = jax.make_mesh((8,), ("shard",))
    cut = NamedSharding(mesh, PartitionSpec("shard"))
    whole = NamedSharding(mesh, PartitionSpec())
    state = [
        jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=cut),
        jax.ShapeDtypeStruct((3,), jnp.int8, sharding=whole),
        jax.device_put(jax.random.key(0), whole),
    ]
    assert state_bytes(state) == 2 * 4 * 4 + 3 + 8


def test_inspection_counts_the_copy_of_a_save_where_asked():
    rep = replicas(8)
    init_fn, step_fn = trainer(rep.wrap_optimizer(adam()))
    step, batch = rep.compile(step_fn), regression_batch()
    state = rep.init(init_fn)
    size = state_bytes(state)
    planned = rep.inspect(step, init_fn, batch, saves=True).memory
    without = rep.inspect(step, init_fn, batch).memory
    step(state, batch)
    called = rep.inspect(step, saves=True).memory
    assert [planned.copy_bytes, called.copy_bytes, without.copy_bytes] == [
        size,
        size,
        0,
    ]


def test_microbatches_are_divisors_of_a_replicas_batch():
    assert larger_divisors(8, 2) == [4, 8]
    assert larger_divisors(7, 7) == []


@pytest.mark.parametrize(
    ("size", "words"), [(512, "512 bytes"), (1536, "1.5 KiB"), (3 * 2**40, "3 TiB")]
)
def test_sizes_are_readable(size, words):
    assert readable(size) == words


def test_only_what_xla_says_of_memory_counts():
    later = "INTERNAL: Error dispatching computation: Out of memory allocating 9 bytes."
    assert is_out_of_memory(XLA_SAID)
    assert is_out_of_memory(jax.errors.JaxRuntimeError(later))
    assert not is_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: no"))
    assert not is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))


def test_a_compiled_step_tells_what_it_needs_of_one_device():
    rep = replicas(8)
    init_fn, step_fn = trainer(rep.wrap_optimizer(adam()))
    lowered = rep.compile(step_fn).lower(rep.init(init_fn), regression_batch())
    found = memory_need(lowered.compile())
    assert found is not None
    batch_bytes = 2 * (4 + 1) * 4  # 2 examples of 4 features and a target, float32
    assert found.arguments_bytes > batch_bytes
    assert found.aliased_bytes > 0  # the state is donated
    assert found.total_bytes < 2**20


def test_a_backend_without_a_limit_says_none():
    assert memory_limit_bytes(jax.devices()) is None


@pytest.mark.slow
def test_a_real_lack_of_memory_is_told_in_our_words():
    code = """
        import resource
        import jax, jax.numpy as jnp
        from replicator.base.out_of_memory import is_out_of_memory
        from replicator.engine.memory import *
        step = jax.jit(lambda a: jnp.sort(a[:, None] + a[None, :], axis=0))
        rows = jnp.ones(20_000)
        compiled = step.lower(rows).compile()
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20),) * 2)
        try:
            compiled(rows).block_until_ready()
        except Exception as failure:
            assert is_out_of_memory(failure), failure
            print(out_of_memory(failure, need=memory_need(compiled), limit_bytes=None,
                                accumulate=1, replica_batch=4))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert "got 1: it needs 1.49 GiB (" in done.stdout
    assert "Use `accumulate=2` or `accumulate=4`" in done.stdout


def test_it_is_a_memory_error():
    assert issubclass(DeviceMemoryError, MemoryError)
