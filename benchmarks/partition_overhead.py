"""Compare a partitioned step of a language model with the same one placed by hand.

`same_program`: for FSDP and for tensor parallelism of a decoder, and for FSDP of a
mixture of experts, our compiled step has the collectives of the step with its
constraints written by hand: as many of each kind, of as many bytes. `ratio_low`: it
takes no longer, on eight fake devices; the slowest of the three, lower 95 % bound.
"""

import dataclasses
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from absl import app, flags
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import replicator
from benchmarks import tasks
from benchmarks.step.mixture import mixture, placed_mixture
from benchmarks.step.placed_step import PAIRS, placed_step
from benchmarks.step.step_pair import OwnLoop, replicator_init, replicator_step
from benchmarks.timing import Estimate, ratio, time_rounds
from replicator import strategies
from replicator.engine.inspection.collectives import collectives_of
from replicator.strategies import Strategy

DEVICES = 8
_ROUNDS = flags.DEFINE_integer("rounds", 20, "Interleaved blocks of each step.")
_STEPS = flags.DEFINE_integer("steps", 4, "Steps per block.")
_WIDTH = flags.DEFINE_integer("width", 128, "Of the language model.")
_CONTEXT = flags.DEFINE_integer("context", 32, "Tokens of a sequence.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """One step twice, as loops; and what each puts on the wire.

    Attributes:
      loops: `"replicator"`, `"by hand"` and, to compare that with itself, once more.
      wire: Of the first two: by kind of collective, how many and how many bytes.
    """

    loops: dict[str, OwnLoop]
    wire: dict[str, dict[str, tuple[int, int]]]


def steps_of(
    strategy: Strategy, task: tasks.Task, by_hand: Callable[..., jax.stages.Wrapped]
) -> Steps:
    """Compile the step of a strategy, ours and by hand.

    Args:
      strategy: It partitions.
      task: What is trained.
      by_hand: `by_hand(task, optimizer, shardings of the state)` returns that step.
    """
    rep = replicator.Replicator(strategy=strategy)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    init_fn, batch = replicator_init(task, tx), task.batch
    state = rep.init(init_fn)
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    rows = rep.layout.batch_shardings(batch, axis=0)
    ours, placed = rep.compile(replicator_step(task, tx)), by_hand(task, tx, where)

    def loop(step: Any) -> OwnLoop:
        begun = rep.init(init_fn)
        return OwnLoop(step, begun, itertools.repeat(batch), sharding=rows)

    compiled = {
        "replicator": ours.lower(state, batch).compile(),
        "by hand": placed.lower(state, batch).compile(),
    }
    return Steps(
        loops={
            "replicator": loop(ours),
            "by hand": loop(placed),
            "by hand again": loop(by_hand(task, tx, where)),
        },
        wire={name: on_the_wire(each, rep.mesh) for name, each in compiled.items()},
    )


def on_the_wire(
    compiled: jax.stages.Compiled, mesh: Mesh
) -> dict[str, tuple[int, int]]:
    """Return the number and the bytes of collectives, by kind and mesh axes."""
    counts, sent = Counter(), Counter()
    for each in collectives_of(compiled.as_text() or "", dict(mesh.shape)):
        counts[each.name] += each.count
        sent[each.name] += each.wire_bytes
    return {name: (counts[name], sent[name]) for name in sorted(counts)}


def _table(wire: Mapping[str, dict[str, dict[str, tuple[int, int]]]]) -> Table:
    table = Table("strategy", "collective", "replicator", "by hand")
    for name, both in wire.items():
        for kind in sorted(set().union(*both.values())):
            cells = [both[who].get(kind, (0, 0)) for who in ("replicator", "by hand")]
            table.add_row(name, kind, *(f"{n}: {size:,} B" for n, size in cells))
    return table


def main(argv: list[str]) -> None:
    del argv
    replicator.fake_devices(DEVICES)
    size = {"vocabulary": 256, "width": _WIDTH.value, "context": _CONTEXT.value}
    decoder = tasks.language_model(32, layers=4, remat=True, **size)
    steps = {
        strategy.name: steps_of(
            strategy, decoder, functools.partial(placed_step, multiplied=multiplied)
        )
        for strategy, multiplied in PAIRS
    }
    steps["mixture"] = steps_of(strategies.fsdp(), mixture(32, **size), placed_mixture)
    wire = {name: each.wire for name, each in steps.items()}
    Console().print(_table(wire))
    same = all(each["replicator"] == each["by hand"] for each in wire.values())
    ratios: dict[str, Estimate] = {}
    itself: dict[str, Estimate] = {}
    for name, each in steps.items():
        blocks = {
            who: functools.partial(loop.run, _STEPS.value)
            for who, loop in each.loops.items()
        }
        times_s = time_rounds(blocks, rounds=_ROUNDS.value)
        ratios[name] = ratio(times_s["replicator"], times_s["by hand"])
        itself[name] = ratio(times_s["by hand again"], times_s["by hand"])
        print(f"{name}: ours / by hand {ratios[name]}, by hand / itself {itself[name]}")
    result = {
        "same_program": int(same),
        "ratio_low": round(max(each.low for each in ratios.values()), 4),
        **{f"{name}_ratio": round(each.median, 4) for name, each in ratios.items()},
        "aa_ratio_low": round(max(each.low for each in itself.values()), 4),
        "devices": DEVICES,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
