"""Hold the laws on the devices of a host, and save and restore a large state there."""

import dataclasses
import functools
import tempfile
import time

import jax
import optax
from flax import nnx

import replicator
from benchmarks import tasks
from benchmarks.accelerator.measured import (
    LeftOut,
    Numbers,
    Parts,
    memory_limit,
    peak_memory,
)
from benchmarks.step.step_pair import replicator_init, replicator_step
from benchmarks.timing import seconds
from models.resnet import ConvNorm
from replicator import strategies
from replicator.base.types import PyTree
from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.errors import ReplicationError, ReplicatorError
from replicator.nnx import BatchNorm
from replicator.testing import assert_replica_invariant

SIZES_GB = (1, 10)


def laws(*, tiny: bool) -> Parts:
    """Hold law 1 on all devices at all accumulations, and law 2 on a wrong step."""
    jax.config.update("jax_default_matmul_precision", "highest")
    replicas = [n for n in (1, 2, 4, 8) if n <= jax.device_count()]
    fsdp = strategies.fsdp(whole_below_bytes=0)
    cases = (
        ("MLP", tasks.mlp(32), (1, 2, 4), None),
        ("convolutions with norms", _convolutions(32), (1,), None),
        ("language model under fsdp", tasks.language_model(32), (1, 2), fsdp),
    )
    failures, checks = [], 0
    for name, task, accumulate, strategy in cases:
        optimizer = replicator.wrap_optimizer(optax.adamw(1e-3))
        step, init = replicator_step(task, optimizer), replicator_init(task, optimizer)
        try:
            report = assert_replica_invariant(
                step,
                init,
                task.batch,
                replicas=replicas,
                accumulate=accumulate,
                at_steps=(0,) if tiny else (0, 1, 10),
                strategy=strategy,
            )
            checks += len(report.comparisons)
        except ReplicatorError as error:
            failures.append(f"{name}: {error}")
    task = tasks.mlp(32)
    rep = replicator.Replicator()
    wrong = replicator_step(task, optax.with_extra_args_support(optax.adamw(1e-3)))
    try:
        state = rep.init(replicator_init(task, optax.adamw(1e-3)))
        rep.compile(wrong)(state, task.batch)
        failures.append("a step that reduces no gradient was not refused")
    except ReplicationError:
        checks += 1
    for failure in failures:
        print(f"FAILED: {failure}", flush=True)
    yield {"failures": len(failures), "law_checks": checks}


class _Convolutions(nnx.Module):
    """Two convolutions, each with a norm over all replicas."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        unit = functools.partial(
            ConvNorm, kernel=3, norm=BatchNorm, compute_dtype=None, rngs=rngs
        )
        self.first, self.second = unit(1, 8), unit(8, tasks.NUM_CLASSES)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.first(images, None))
        return self.second(x, None).mean((1, 2))


def _convolutions(batch: int) -> tasks.Task:
    return dataclasses.replace(
        tasks.digits_resnet(batch),
        init_model=lambda key: _Convolutions(rngs=nnx.Rngs(key)),
    )


def checkpoint(*, tiny: bool) -> Parts:
    """Save and restore states of random numbers; every bit must be back."""
    for size in SIZES_GB:
        name = f"checkpoint_{size}gb"
        if not tiny and 3e9 * size > memory_limit():
            raise LeftOut(f"{size} GB and two copies of it do not fit a device")
        leaves, elements = (4 * size, 4096) if tiny else (8 * size, 2**25)
        yield _save_and_restore(name, leaves, elements)
        yield peak_memory(f"{name}_peak_gb")


def _save_and_restore(name: str, leaves: int, elements: int) -> Numbers:
    def init_fn(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, leaves)
        return [jax.random.normal(each, (elements,)) for each in keys]

    state = jax.block_until_ready(replicator.Replicator().init(init_fn))
    snapshot = Snapshot(step=1, arrays=state)
    with (
        tempfile.TemporaryDirectory() as directory,
        CheckpointStore(directory) as store,
    ):
        blocked_s = seconds(lambda: store.save_nowait(snapshot))
        save_s = blocked_s + seconds(store.wait)
        began_s = time.monotonic()
        saved = store.restore(state)
        assert saved is not None
        restored = jax.block_until_ready(saved.arrays)
        restore_s = time.monotonic() - began_s
    for before, after in zip(state, restored, strict=True):
        assert (before == after).all(), "what was restored is not what was saved"
    return {
        f"{name}_blocked_ms": round(1e3 * blocked_s, 1),
        f"{name}_save_s": round(save_s, 2),
        f"{name}_restore_s": round(restore_s, 2),
    }
