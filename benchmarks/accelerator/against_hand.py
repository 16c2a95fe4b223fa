"""Time `rep.run` and our compiled step against JAX written by hand."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
from benchmarks.accelerator.measured import LeftOut, Parts
from benchmarks.step.placed_step import jitted, use_placed
from benchmarks.step.run_against import OURS, time_run_against
from benchmarks.step.step_pair import (
    OwnLoop,
    hand_written_state,
    hand_written_step,
    replicator_init,
    replicator_step,
)
from benchmarks.tasks import Task, of_plain_params
from benchmarks.timing import ratio, seconds
from replicator import strategies
from replicator.base.mesh import split_over_replicas
from replicator.base.types import PyTree
from replicator.strategies import Strategy

STEP_MS = (0.1, 1.0, 10.0, 100.0)


def step_against_hand(*, tiny: bool) -> Parts:
    """Compare with `jit(shard_map)` by hand, the state whole on all devices."""
    yield from _against_hand("step", None, tiny=tiny)


def fsdp_against_hand(*, tiny: bool) -> Parts:
    """Compare with `jit` and constraints by hand, the state cut over devices."""
    yield from _against_hand("fsdp", strategies.fsdp(whole_below_bytes=0), tiny=tiny)


def _against_hand(name: str, strategy: Strategy | None, *, tiny: bool) -> Parts:
    rep = replicator.Replicator(strategy=strategy)
    width = 16 if tiny else 512
    rows = (8 if tiny else 64) * jax.device_count()
    network = functools.partial(_Deep, width=width, rows=rows)
    least_s, more_s = (_step_seconds(rep, network(layers=n), strategy) for n in (1, 65))
    layer_s = max(more_s - least_s, 1e-7) / 64
    for step_ms in STEP_MS[:2] if tiny else STEP_MS:
        count = 1 + max(0, round((step_ms / 1e3 - least_s) / layer_s))
        block = max(1, round((0.01 if tiny else 0.2) / step_ms * 1e3))
        rounds = 2 if tiny else 9
        times_s = _time_loops(
            rep, network(layers=count), strategy, block=block, rounds=rounds
        )
        key = f"{name}_{step_ms:g}ms"
        hand = times_s["by hand"]
        yield {
            f"{key}_run_ratio": round(ratio(times_s[OURS], hand).median, 4),
            f"{key}_own_ratio": round(ratio(times_s["own"], hand).median, 4),
            f"{key}_step_ms": round(1e3 * float(np.median(hand)) / block, 3),
        }
    if tiny:
        raise LeftOut("steps of a toy are short")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Deep:
    """A network that multiplies by one matrix so many times."""

    layers: int
    width: int
    rows: int

    def loss(self, params: PyTree, batch: PyTree) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ params["w"]), None

        x, _ = jax.lax.scan(layer, batch["x"], length=self.layers)
        return jnp.square((x * params["v"]).sum(-1) - batch["y"]).mean()

    def init(self, key: jax.Array) -> PyTree:
        w = jax.random.normal(key, (self.width, self.width)) * self.width**-0.5
        return {"w": w, "v": jnp.ones(self.width)}

    def task(self) -> Task:
        """Return its training on random numbers."""
        rng = np.random.default_rng(0)
        return Task(
            init_model=self.init,
            value_and_grad=of_plain_params(self.loss),
            params_of=lambda params: params,
            with_params=lambda _, params: params,
            batch={
                "x": rng.standard_normal((self.rows, self.width), np.float32),
                "y": rng.standard_normal(self.rows, np.float32),
            },
        )


def _by_hand(
    rep: replicator.Replicator, network: _Deep, strategy: Strategy | None
) -> OwnLoop:
    """Return the loop as one writes it without this library."""
    task = network.task()
    tx, batches = optax.adamw(1e-3), itertools.repeat(task.batch)
    rows = rep.layout.batch_shardings(task.batch, axis=0)
    if strategy is None:
        step = hand_written_step(task, tx, rep.mesh, norm=True)
        state = hand_written_state(task, tx, rep.mesh)
        return OwnLoop(step, state, batches, sharding=split_over_replicas(rep.mesh))
    state = rep.init(replicator_init(task, tx))
    kept = jax.tree.map(lambda leaf: leaf.sharding, state)

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        use = functools.partial(use_placed, "whole")
        return network.loss(jax.tree.map(use, params, kept["model"]), batch)

    by_hand = dataclasses.replace(task, value_and_grad=of_plain_params(loss_fn))
    return OwnLoop(jitted(by_hand, tx, kept), state, batches, sharding=rows)


def _step_seconds(
    rep: replicator.Replicator, network: _Deep, strategy: Strategy | None
) -> float:
    loop = _by_hand(rep, network, strategy)
    loop.run(3)
    return min(seconds(lambda: loop.run(20)) for _ in range(3)) / 20


def _time_loops(
    rep: replicator.Replicator,
    network: _Deep,
    strategy: Strategy | None,
    *,
    block: int,
    rounds: int,
) -> dict[str, list[float]]:
    task, optimizer = network.task(), rep.wrap_optimizer(optax.adamw(1e-3))
    step, init = replicator_step(task, optimizer), replicator_init(task, optimizer)
    rows = rep.layout.batch_shardings(task.batch, axis=0)
    batches = itertools.repeat(task.batch)
    own = OwnLoop(rep.compile(step), rep.init(init), batches, sharding=rows)
    hand = _by_hand(rep, network, strategy)
    return time_run_against(
        lambda hook: rep.run(
            step,
            [task.batch],
            init_fn=init,
            steps=(rounds + 1) * block,
            hooks=[hook],
            inputs=replicator.InputOptions(prefetch=2),
            display=False,
        ),
        {"own": lambda: own.run(block), "by hand": lambda: hand.run(block)},
        steps_per_block=block,
    )
