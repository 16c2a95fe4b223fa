"""One process of a pair: it compiles a model's step under each candidate, and times it.

It reads names of candidates from standard input, a line each, and makes three steps of
each; both processes are given the same. The first writes a line of JSON for each: the
seconds of the fastest step. Its first line is what it found of the machine and of the
steps: measured speeds, the latency between the hosts, and features of each step.
"""

import dataclasses
import json
import sys

import jax
import numpy as np
import optax
from absl import app, flags, logging
from jax import lax

import replicator
from benchmarks.slow_links.models import MODELS, candidates
from benchmarks.slow_links.pair import ANSWER
from benchmarks.step.step_pair import placed_batch, replicator_init, replicator_step
from benchmarks.tasks import Task
from benchmarks.timing import seconds
from replicator import InputOptions, Replicator
from replicator.base.mesh import replica_mesh
from replicator.cli.checks.speeds import measure_speeds
from replicator.engine.layout import EQUAL
from replicator.engine.replicated import ReplicatedLayout
from replicator.strategies import Features, Strategy

_MODEL = flags.DEFINE_enum("model", next(iter(MODELS)), list(MODELS), "Model.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "Where the processes meet.")
_PROCESS = flags.DEFINE_integer("process", None, "Number of this one.")

_STEPS = 3
_ROUNDS = 5
_SUMS = 8
"""All-reduces in a row: the dispatch of a call counts once."""


class CompiledCandidate:
    """A compiled step, with a state of its own.

    Args:
      task: What is trained.
      strategy: How its state and step are spread.

    Attributes:
      features: What a step computes and sends.
    """

    def __init__(self, task: Task, strategy: Strategy) -> None:
        rep = Replicator(strategy=strategy, compilation_cache=False)
        tx = rep.wrap_optimizer(optax.sgd(1e-3))
        self._step = rep.compile(replicator_step(task, tx))
        self._state = rep.init(replicator_init(task, tx))
        self._batch = placed_batch(rep, [task.batch], InputOptions(epochs=1))
        self.run()
        self.features: Features = rep.inspect(self._step).features()

    def run(self) -> None:
        """Make a step, and wait for it."""
        self._state, metrics = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))

    def fastest_s(self) -> float:
        """Return the seconds of the fastest of three steps."""
        return min(seconds(self.run) for _ in range(_STEPS))


def latency_s() -> float:
    """Return the latency of the network: half of an all-reduce of one number."""
    layout = ReplicatedLayout(replica_mesh())

    def reduce(x: jax.Array) -> jax.Array:
        for _ in range(_SUMS):
            x = lax.pmean(x, "replica")
        return x

    run = jax.jit(layout.spread(reduce, inputs=(EQUAL,), outputs=EQUAL))
    run(np.float32(1)).block_until_ready()
    times_s = [
        seconds(lambda: run(np.float32(1)).block_until_ready()) for _ in range(_ROUNDS)
    ]
    return min(times_s) / _SUMS / 2


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    replicator.distributed.initialize(_COORDINATOR.value, 2, _PROCESS.value)
    measured = measure_speeds(jax.local_devices())
    found = {"measured": dataclasses.asdict(measured), "latency_s": latency_s()}
    task = MODELS[_MODEL.value]()
    compiled = {
        name: CompiledCandidate(task, candidate.strategy)
        for name, candidate in candidates(_MODEL.value).items()
    }
    found["features"] = {
        name: dataclasses.asdict(each.features) for name, each in compiled.items()
    }
    _write(found)
    for line in sys.stdin:
        _write(compiled[line.strip()].fastest_s())


def _write(found: object) -> None:
    if _PROCESS.value == 0:
        print(f"{ANSWER}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    app.run(main)
