"""Compare our cross-replica batch norm with that of flax, forward and backward.

One function, written by hand, is lifted onto eight fake devices with each norm in turn:
ours, flax's with `use_fast_variance=False`, the same again, and flax's fast one, whose
variance cancels where |mean| is far above std (`replicator/collectives/moments.py`). It
returns all that a step needs of a norm: outputs, moved running statistics, gradients of
a weighted sum of the outputs with respect to inputs, scale and bias. A step reduces the
latter two over replicas with all other gradients, so here they stay apart.

Before anything is timed all of that has to be equal. `bytes_ratio` is of what a device
sends, if collectives are rings. Of several shapes the worst counts.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping

import jax
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import replicator
from benchmarks.step.norms import (
    AGAIN,
    FAST,
    FLAX,
    OURS,
    make_batch,
    make_norms,
    require_equal,
    step_over,
)
from benchmarks.step.step_pair import OwnLoop
from benchmarks.timing import Estimate, ratio, time_rounds
from replicator.base.mesh import replica_mesh
from replicator.engine.inspection.collectives import collectives_of

DEVICES = 8
_SHAPES = flags.DEFINE_multi_string(
    "shape",
    ["8,16,16,64", "8,8,8,128", "8,4,4,256"],
    "Inputs of one replica: examples, height, width, features; may be repeated.",
)
_ROUNDS = flags.DEFINE_integer("rounds", 40, "Interleaved blocks of each norm.")
_CALLS = flags.DEFINE_integer("calls", 10, "Calls of one block.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one norm on inputs of one shape.

    Attributes:
      times_s: Of each round.
      collectives: How many one call executes.
      wire_bytes: What one device sends in them.
    """

    times_s: list[float]
    collectives: int
    wire_bytes: int


def measure(
    shape: tuple[int, ...], mesh: Mesh, *, rounds: int, calls: int
) -> dict[str, Measured]:
    """Compare what the norms compute, then time them; a wrong one raises."""
    batch, step = make_batch(shape, mesh), step_over(mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    norms = {
        name: jax.device_put(norm, whole)
        for name, norm in make_norms(shape[-1]).items()
    }
    for name, norm in norms.items():
        require_equal(step(norm, batch), step(norms[FLAX], batch), name)
    sent = {
        name: collectives_of(
            step.lower(norm, batch).compile().as_text() or "", dict(mesh.shape)
        )
        for name, norm in norms.items()
    }
    blocks = {
        name: functools.partial(OwnLoop(step, norm, itertools.repeat(batch)).run, calls)
        for name, norm in norms.items()
    }
    times_s = time_rounds(blocks, rounds=rounds)
    return {
        name: Measured(
            times_s=times_s[name],
            collectives=sum(each.count for each in sent[name]),
            wire_bytes=sum(each.wire_bytes for each in sent[name]),
        )
        for name in norms
    }


def worst(found: Mapping[str, dict[str, Measured]], name: str, other: str) -> Estimate:
    """Estimate the ratio of times, for the shape where it is the largest."""
    ratios = [ratio(by[name].times_s, by[other].times_s) for by in found.values()]
    return max(ratios, key=lambda each: each.median)


def _table(found: Mapping[str, dict[str, Measured]]) -> Table:
    table = Table("inputs", "norm", "ms", "/ flax", "sends", "bytes")
    for shape, by in found.items():
        for name, each in by.items():
            table.add_row(
                shape,
                name,
                f"{1e3 * float(np.median(each.times_s)) / _CALLS.value:.2f}",
                str(ratio(each.times_s, by[FLAX].times_s)),
                str(each.collectives),
                f"{each.wire_bytes:,}",
            )
    return table


def main(argv: list[str]) -> None:
    del argv
    replicator.fake_devices(DEVICES)
    mesh = replica_mesh(DEVICES)
    found = {
        shape: measure(
            tuple(map(int, shape.split(","))),
            mesh,
            rounds=_ROUNDS.value,
            calls=_CALLS.value,
        )
        for shape in _SHAPES.value
    }
    Console().print(_table(found))
    time, chance = worst(found, OURS, FLAX), worst(found, AGAIN, FLAX)
    fast = worst(found, OURS, FAST)
    result = {
        "time_ratio": round(time.median, 4),
        "time_ratio_low": round(time.low, 4),
        "bytes_ratio": round(
            max(by[OURS].wire_bytes / by[FLAX].wire_bytes for by in found.values()), 4
        ),
        "fast_time_ratio": round(fast.median, 4),
        "fast_time_ratio_low": round(fast.low, 4),
        "aa_ratio": round(chance.median, 4),
        "collectives": max(by[OURS].collectives for by in found.values()),
        "flax_collectives": max(by[FLAX].collectives for by in found.values()),
        "devices": DEVICES,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
