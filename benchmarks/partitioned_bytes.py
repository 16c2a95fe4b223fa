"""Compare forecast bytes of strategies that partition with those compiled for TPUs.

A process of its own, in the environment of `benchmarks/tpu_environment.py`; it prints a
JSON object: by builder and model, bytes that a device sends by the forecast over those
of the program for `v5e:4x4`.
"""

import json
from collections import Counter

import optax
from jax.experimental import topologies

from benchmarks import tasks
from benchmarks.step.step_pair import replicator_init, replicator_step
from benchmarks.tpu_environment import run_for_tpus
from replicator import Replicator, strategies
from replicator.strategies.cost import Features

TOPOLOGY = "v5e:4x4"
BUILDERS = {
    "zero1": strategies.zero1(),
    "zero2": strategies.zero2(),
    "fsdp": strategies.fsdp(),
    "hybrid": strategies.hybrid(shard=4),
}


def models() -> dict[str, tasks.Task]:
    """Return the models by name."""
    sizes = {"layers": 4, "width": 512, "heads": 4, "vocabulary": 1024, "context": 128}
    return {
        "mlp": tasks.mlp(256, sizes=(1024, 2048, 2048, 1024)),
        "language model": tasks.language_model(32, **sizes),
        "language model, remat": tasks.language_model(32, remat=True, **sizes),
    }


def ratio_of(task: tasks.Task, strategy: strategies.Strategy) -> float:
    """Return forecast / compiled bytes of a step under a strategy, and print both."""
    devices = topologies.get_topology_desc(TOPOLOGY, platform="tpu").devices
    tx = optax.adamw(1e-3)
    init_fn = replicator_init(task, tx)
    rep = Replicator(devices=devices, strategy=strategy, compilation_cache=False)
    found = rep.inspect(replicator_step(task, tx), init_fn, task.batch)
    variables = strategies.variables_made_by(init_fn)
    forecast = strategies.forecast(strategy, variables, len(devices), flops={})
    ours, theirs = _by_kind(forecast), _by_kind(found.features())
    print(f"{strategy.name}: forecast {dict(ours)}, compiled {dict(theirs)}")
    return ours.total() / theirs.total()


def _by_kind(features: Features) -> Counter[str]:
    sent: Counter[str] = Counter()
    for each in features.traffic:
        sent[each.kind] += each.wire_bytes
    return sent


def ratios_elsewhere() -> dict[str, float]:
    """Compile in a process of its own; return its ratios by builder and model."""
    return run_for_tpus(__name__)


def main() -> None:
    """Print the ratios."""
    ratios = {}
    for model, task in models().items():
        for name, strategy in BUILDERS.items():
            print(model, end=" under ")
            ratios[f"{name}, {model}"] = round(ratio_of(task, strategy), 3)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
