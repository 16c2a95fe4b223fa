"""Seconds of the published runs by the cost model, from data sheets alone.

What was compiled counts as compiled. Else the work is a forecast: operations of the
jaxpr of one chip's share of the batch, and the bytes of the strategy's table.
"""

import dataclasses
import functools

import jax
import optax

from benchmarks.plan_published.compiled import Kept, task_of
from benchmarks.plan_published.published import DECODERS, SEQUENCE, Run
from benchmarks.step.step_pair import replicator_init, replicator_step
from replicator import strategies
from replicator.engine.program_cost import TracedWork, traced_work
from replicator.strategies.cost import (
    Features,
    StepTime,
    Traffic,
    forecast,
    predict,
    traffic_over,
)
from replicator.strategies.machine import Machine


def predicted(run: Run, kept: Kept | None, slices: int = 1) -> StepTime:
    """Return the prediction for a step of a run.

    Args:
      run: The published run.
      kept: What its step was compiled to; None to forecast it.
      slices: Number of slices; each has a copy of the state, and between them gradients
        are reduced as they lie: in pieces, in float32.
    """
    machine = Machine.from_topology(run.topology, slices=slices)
    chips = machine.num_devices // slices
    features = _forecast(run, chips) if kept is None else kept.features
    if slices > 1:
        piece = 4 * DECODERS[run.decoder].parameters // chips
        over = traffic_over(
            "all-reduce",
            ["replica"],
            {"replica": slices, "shard": chips},
            2 * piece * (slices - 1) // slices,
        )
        features = dataclasses.replace(
            features,
            num_devices=machine.num_devices,
            traffic=(*features.traffic, over),
        )
    return predict(features, machine)


def _forecast(run: Run, chips: int) -> Features:
    """Return the work of a chip, not compiled."""
    task = task_of(run, 1)
    variables = strategies.variables_made_by(replicator_init(task, optax.adamw(1e-3)))
    work = _work(run.decoder, run.sequences, run.remat)
    found = forecast(
        strategies.fsdp(),
        variables,
        chips,
        flops={dtype: number * chips for dtype, number in work.flops.items()},
        memory_bytes=work.product_bytes * chips,
    )
    if run.tensor == 1:
        return found
    # Chips that share a layer's products hold a part of its weights each, and gather
    # that from the others that have it.
    mesh = {"shard": chips // run.tensor, "model": run.tensor}
    weights = [
        traffic_over(
            each.kind, ["shard"], mesh, each.wire_bytes // run.tensor, each.count
        )
        for each in found.traffic
    ]
    traffic = (*weights, _activations(run, mesh))
    return dataclasses.replace(found, traffic=traffic)


def _activations(run: Run, mesh: dict[str, int]) -> Traffic:
    """Return the sums of activations of a tensor-parallel step.

    Each half of a layer adds up once forward and once backward (Shoeybi et al. 2019,
    "Megatron-LM", §3), and once more where the layer is computed again.
    """
    decoder, tensor = DECODERS[run.decoder], run.tensor
    times = (6 if run.remat else 4) * decoder.layers
    tokens = run.sequences * tensor * SEQUENCE
    one = 2 * tokens * decoder.width  # bfloat16
    sent = 2 * one * (tensor - 1) // tensor
    return traffic_over("all-reduce", ["model"], mesh, times * sent, times)


@functools.cache
def _work(decoder: str, sequences: int, remat: bool) -> TracedWork:
    run = Run(
        decoder=decoder, topology="", sequences=sequences, teraflops={}, remat=remat
    )
    task, tx = task_of(run, 1), optax.adamw(1e-3)
    state = jax.eval_shape(replicator_init(task, tx), jax.random.key(0))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), task.batch)
    return traced_work(jax.make_jaxpr(replicator_step(task, tx))(state, batch))
