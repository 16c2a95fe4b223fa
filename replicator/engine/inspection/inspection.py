"""Report on a compiled step: collectives, memory and arithmetic, as a table."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax

from replicator.base.types import PyTree
from replicator.engine.inspection.collectives import Collective, collectives_of
from replicator.engine.inspection.hlo_text import array_bytes, arrays
from replicator.engine.layout import Layout
from replicator.engine.memory import MemoryNeed, state_bytes
from replicator.engine.program_cost import ProgramCost, TracedWork, engineering
from replicator.strategies.cost import Features
from replicator.strategies.table import aligned
from replicator.strategies.traffic import Traffic, together, traffic_over
from replicator.strategies.variables import variables_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Report on one call of a compiled step; `print` it for a table.

    It is of the compiler's program for these devices: another backend, or another
    version of one, may join, split and choose collectives otherwise. A CPU has no
    collectives of bfloat16: there they are `f32`, with twice the bytes. And where
    gradients are kept in pieces a CPU adds them up whole, and cuts them then: an
    `all-reduce`.

    Attributes:
      strategy: Name of the strategy.
      mesh: Size of each axis of the mesh.
      collectives: The collectives, the most bytes first.
      memory: Memory on each device; None if the backend does not report it.
      flops: Number of operations of matrix products and convolutions, of all devices
        together.
      steps_per_call: Number of updates of a call.
      work: Work of a call, as it was traced.
    """

    strategy: str
    mesh: dict[str, int]
    collectives: tuple[Collective, ...]
    memory: MemoryNeed | None
    flops: int
    steps_per_call: int = 1
    work: TracedWork = field(default_factory=TracedWork, repr=False)

    @property
    def wire_bytes(self) -> int:
        """Number of bytes that one device sends in a call, if collectives are rings."""
        return sum(each.wire_bytes for each in self.collectives)

    def counts(self) -> dict[str, int]:
        """Return the number of collectives by kind and axes.

        Returns:
          For example `{"all-gather shard": 12, "all-reduce replica,shard": 1}`.
        """
        counts: Counter[str] = Counter()
        for each in self.collectives:
            counts[each.name] += each.count
        return dict(sorted(counts.items()))

    def features(self) -> Features:
        """Return the work of one update on one device, for `strategies.predict`.

        Where the step has replicas, bytes of its collectives are as they were traced,
        in their own dtype, and they are as many as the compiler, which joins some of
        them, made; else all is as the compiler made it. What goes through memory are
        operands and results of products, the state, read and written once, and what
        arrives, written and read.

        >>> rep = replicator.Replicator()
        >>> found = rep.inspect(step_fn, init_fn, batch).features()
        >>> [(each.kind, each.axes) for each in found.traffic]
        [('all-reduce', ('replica',))]
        """
        devices, calls = math.prod(self.mesh.values()), self.steps_per_call
        traffic = self._joined(self.work.traffic)
        if not self.work.replicates:
            traffic = together(
                traffic_over(
                    each.kind, each.axes, self.mesh, each.wire_bytes, each.count
                )
                for each in self.collectives
            )
        moved = self.work.product_bytes / devices
        moved += 2 * sum(each.wire_bytes for each in traffic)
        if self.memory is not None:
            moved += 2 * self.memory.arguments_bytes * calls
        return Features(
            num_devices=devices,
            flops={d: n / devices / calls for d, n in self.work.flops.items()},
            memory_bytes=moved / calls,
            traffic=tuple(
                replace(
                    each,
                    wire_bytes=each.wire_bytes // calls,
                    count=max(each.count // calls, 1),
                )
                for each in traffic
            ),
        )

    def _joined(self, traffic: tuple[Traffic, ...]) -> tuple[Traffic, ...]:
        """Return traced collectives, of each kind as many as the compiler made."""
        traced, made = Counter(), Counter()
        for one in traffic:
            traced[one.kind] += one.count
        for each in self.collectives:
            made[each.kind] += each.count
        share = {
            kind: min(made[kind] / number, 1.0) if made[kind] else 1.0
            for kind, number in traced.items()
        }
        return tuple(
            replace(one, count=max(round(one.count * share[one.kind]), 1))
            for one in traffic
        )

    def __str__(self) -> str:
        """Return a table: totals, and a line for each collective."""
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        memory = self.memory.describe() if self.memory is not None else "not known"
        lines = [
            f"{self.strategy} over {mesh}",
            f"memory of a device: {memory}",
            f"arithmetic of all devices: {engineering(self.flops)}FLOP",
        ]
        return "\n".join([*lines, *_table(self.collectives)])


def inspection_of(
    compiled: jax.stages.Compiled,
    *,
    cost: ProgramCost,
    layout: Layout,
    state: PyTree,
    copies: int,
    steps_per_call: int,
) -> Inspection:
    """Return the report on a compiled step.

    Args:
      compiled: Its program, from `shard_step`.
      cost: Cost of a call.
      layout: Its layout.
      state: Shapes of its state, with shardings.
      copies: Number of copies of the state, of saves, that count as memory.
      steps_per_call: Number of updates of a call.
    """
    described, memory = layout.describe(), cost.memory
    if memory is not None and copies:
        memory = replace(memory, copy_bytes=copies * state_bytes(state))
    return Inspection(
        strategy=described.get("name", "data_parallel"),
        mesh=described["mesh"],
        collectives=collectives_of(
            compiled.as_text() or "",
            described["mesh"],
            [each.path for each in variables_of(state)],
        ),
        memory=memory,
        flops=cost.flops,
        steps_per_call=steps_per_call,
        work=cost.work,
    )


def _table(collectives: Sequence[Collective]) -> list[str]:
    rows = [("collective", "count", "bytes sent", "axes", "arrays", "from")]
    rows += [
        (
            each.kind,
            f"{each.count:,}" + ("" if each.is_counted else " a turn"),
            f"{each.wire_bytes:,}",
            ",".join(each.axes),
            _short(each.arrays),
            origin(each),
        )
        for each in collectives
    ]
    count = sum(each.count for each in collectives)
    total = sum(each.wire_bytes for each in collectives)
    rows.append(("all", f"{count:,}", f"{total:,}", "", "", ""))
    return aligned(rows, numbers=(1, 2))


def _short(shapes: Sequence[str]) -> str:
    largest = max(shapes, key=lambda each: max(array_bytes(a) for a in arrays(each)))
    others = len(shapes) - 1
    return f"{largest} and {others} more" if others else largest


def origin(collective: Collective) -> str:
    """Return the source of a collective, in short."""
    path, colon, rest = collective.source.partition(":")
    source = f"{os.path.basename(path)}{colon}{rest}" or collective.op_name
    return f"{source} ({collective.variable})" if collective.variable else source
