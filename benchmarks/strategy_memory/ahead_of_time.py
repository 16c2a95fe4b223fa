"""Compile a large language model's step for a TPU pod that is not there.

libtpu holds the whole compiler; what it makes says how much memory of a device is
needed, and what goes over the wire. It is a process of its own: a compiler that aborts
ends nobody else. Prints a JSON object.
"""

import json
import math
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from jax.experimental import topologies

from benchmarks import tasks
from benchmarks.step.step_pair import replicator_init, replicator_step
from benchmarks.tpu_environment import run_for_tpus
from replicator import Replicator, strategies
from replicator.base.out_of_memory import is_out_of_memory
from replicator.engine.inspection.collectives import Collective

_TOPOLOGY = flags.DEFINE_string("topology", "v5e:16x16", "Which devices there are.")
_LAYERS = flags.DEFINE_integer("tpu_layers", 20, "Of the model.")
_WIDTH = flags.DEFINE_integer("tpu_width", 2048, "Of the model.")

_MEMORY_BYTES = 16 * 2**30  # of a v5e
# No weight has this factor, which is how activations are told from parts of weights.
_CONTEXT = 9 * 128
_GATHERS = ("all-gather", "all-to-all", "collective-permute", "ragged-all-to-all")


def compile_elsewhere(arguments: Sequence[str]) -> dict[str, float]:
    """Compile in another process; return the numbers that it prints."""
    return run_for_tpus(__spec__.name, arguments)


def activation_gathers(
    collectives: Sequence[Collective], weights: Sequence[tuple[int, ...]]
) -> int:
    """Count the gathers and exchanges of arrays that are no part of a weight.

    Args:
      collectives: Of a compiled step.
      weights: Shapes of the parameters.
    """
    sizes = [math.prod(shape) for shape in weights]

    def is_weight(array: str) -> bool:
        inside = array.partition("[")[2].rstrip("]")
        size = math.prod(int(each) for each in inside.split(",") if each)
        return any(whole % size == 0 for whole in sizes)

    return sum(
        each.count
        for each in collectives
        if each.kind in _GATHERS and not all(map(is_weight, each.arrays))
    )


def main(argv: list[str]) -> None:
    del argv
    devices = topologies.get_topology_desc(_TOPOLOGY.value, platform="tpu").devices
    task = tasks.language_model(
        len(devices),
        vocabulary=16 * _WIDTH.value,
        layers=_LAYERS.value,
        width=_WIDTH.value,
        heads=_WIDTH.value // 128,
        context=_CONTEXT,
        compute_dtype=jnp.bfloat16,
        remat=True,
    )
    rep = Replicator(
        devices=devices, strategy=strategies.fsdp(), compilation_cache=False
    )
    tx = optax.adamw(1e-3)
    init_fn, step_fn = replicator_init(task, tx), replicator_step(task, tx)
    made = jax.eval_shape(init_fn, jax.random.key(0))
    weights = [leaf.shape for leaf in jax.tree.leaves(made["model"])]
    started_s = time.monotonic()
    try:
        found = rep.inspect(step_fn, init_fn, task.batch)
    except jax.errors.JaxRuntimeError as failure:
        if not is_out_of_memory(failure):
            raise
        print(failure)
        print(json.dumps({"fits": 0}))
        return
    seconds = time.monotonic() - started_s
    need = found.memory.total_bytes if found.memory is not None else math.inf
    print(found)
    numbers = {
        "fits": int(need <= _MEMORY_BYTES),
        "activation_gathers": activation_gathers(found.collectives, weights),
        "tpu_parameters": sum(math.prod(shape) for shape in weights),
        "tpu_device_gib": round(need / 2**30, 2),
        "tpu_compile_s": round(seconds, 1),
    }
    print(json.dumps(numbers))


if __name__ == "__main__":
    app.run(main)
