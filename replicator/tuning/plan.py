"""Plan a step: what it needs, and how fast it is, on machines that need not be there.

For each topology and strategy the real step is compiled, one at a time; where no
compiler is here, it is traced, and the rest is a forecast.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from replicator.base.out_of_memory import readable
from replicator.strategies.cost import StepTime, predict
from replicator.strategies.machine import Machine
from replicator.strategies.strategy import Strategy
from replicator.tuning.compiling import CompileOrder, compile_step
from replicator.tuning.kept_outcomes import outcomes_folder
from replicator.tuning.named import NamedStrategy, strategies_on
from replicator.tuning.outcome import CompileOutcome
from replicator.tuning.problem import ProblemFile
from replicator.tuning.topologies import has_tpu_compiler


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """A step on one topology under one strategy.

    Attributes:
      topology: The topology.
      num_devices: Number of its devices.
      strategy: The strategy, as it was asked for.
      placed: The strategy itself.
      outcome: Outcome of compiling.
      time: Predicted seconds of a step; None for what did not compile.
      limit_bytes: Memory of a device: by the compiler, or the published figure.
    """

    topology: str
    num_devices: int
    strategy: str
    placed: Strategy
    outcome: CompileOutcome
    time: StepTime | None
    limit_bytes: float | None

    @property
    def fits(self) -> bool | None:
        """Whether it fits into memory; None if that is not known.

        The compiler has the last word: sums of parts count what is not there at the
        same time. A forecast knows the state alone.
        """
        if self.outcome.status == "compiled":
            return True
        return False if self.excess_bytes else None

    @property
    def excess_bytes(self) -> float | None:
        """Bytes of a device that are missing, 0 where it fits; None if not known."""
        outcome, limit = self.outcome, self.limit_bytes
        if outcome.status == "memory":
            needed = outcome.memory_bytes
            return 1 if needed is None or limit is None else needed - limit
        if outcome.status == "forecast" and limit is not None:
            return max(outcome.state_bytes - limit, 0)
        return 0 if outcome.status == "compiled" else None

    @property
    def examples_per_s(self) -> float | None:
        """Examples of all devices a second, if nothing that is sent overlaps."""
        return None if self.time is None else self.outcome.examples / self.time.high_s

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes that a device sends in a step, by the mesh axes that it sends along."""
        found: dict[str, int] = {}
        for each in self.outcome.features.traffic if self.outcome.features else ():
            axes = ",".join(each.axes)
            found[axes] = found.get(axes, 0) + each.wire_bytes
        return found

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data, with what follows from it."""
        plain = dataclasses.asdict(self)
        del plain["placed"]
        return {
            **plain,
            "fits": self.fits,
            "excess_bytes": self.excess_bytes,
            "low_s": self.time and self.time.low_s,
            "high_s": self.time and self.time.high_s,
            "examples_per_s": self.examples_per_s,
            "sent_bytes": self.sent_bytes,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Options of a plan.

    Attributes:
      accumulate: Number of microbatches of an update.
      compiles: Whether to compile where there is a compiler, or only to forecast.
      rehearses: Whether the problem must have small sizes.
      limit_s: Seconds that compiling may take, for each row.
    """

    accumulate: int = 1
    compiles: bool = True
    rehearses: bool = False
    limit_s: float = 3600.0


class Planner:
    """Makes the rows of a plan: a process of its own for each.

    Attributes:
      options: The options.

    Args:
      problem: The problem.
      make_replicator: `Replicator`.
      options: The options.
    """

    def __init__(
        self,
        problem: ProblemFile,
        make_replicator: Callable[..., Any],
        options: PlanOptions,
    ) -> None:
        self.options = options
        self._problem, self._make = problem, make_replicator

    def rows(
        self, topologies: Sequence[str], strategies: Sequence[NamedStrategy]
    ) -> Iterator[PlanRow]:
        """Yield a row for each topology and strategy, when it is known.

        Args:
          topologies: Topologies, such as `"v5e:16x16"` and `"h100:4x8"`.
          strategies: The strategies.

        Raises:
          ArgumentError: A topology does not exist, or the problem is none.
        """
        machines = {each: Machine.from_topology(each) for each in topologies}
        for topology, machine in machines.items():
            for named in strategies_on(machine, strategies):
                yield self.row(topology, named)

    def row(
        self, topology: str, named: NamedStrategy, *, accumulate: int | None = None
    ) -> PlanRow:
        """Return the row of one strategy on one topology.

        Args:
          topology: The topology.
          named: The strategy.
          accumulate: Number of microbatches; that of the options by default.

        Raises:
          ArgumentError: The topology does not exist, or the problem is none.
        """
        machine = Machine.from_topology(topology)
        order = self._order(topology, machine, strategy=named.strategy)
        if accumulate is not None:
            order = dataclasses.replace(order, accumulate=accumulate)
        outcome = compile_step(order, limit_s=self.options.limit_s)
        features, hardware = outcome.features, machine.hardware
        published = hardware.memory_bytes if hardware is not None else None
        return PlanRow(
            topology=topology,
            num_devices=machine.num_devices,
            strategy=named.text,
            placed=named.strategy,
            outcome=outcome,
            time=None if features is None else predict(features, machine),
            limit_bytes=outcome.limit_bytes or published,
        )

    def work(self, topology: str) -> CompileOutcome:
        """Return the outcome that has the work of the step on all devices.

        Args:
          topology: The topology.

        Raises:
          ArgumentError: The topology does not exist, or the problem is none.
        """
        machine = Machine.from_topology(topology)
        order = self._order(topology, machine, strategy=None, work_only=True)
        return compile_step(order, limit_s=self.options.limit_s)

    def _order(self, topology: str, machine: Machine, **asked: Any) -> CompileOrder:
        return CompileOrder(
            problem=self._problem,
            make_replicator=self._make,
            devices=devices_for(topology, machine, compiles=self.options.compiles),
            accumulate=self.options.accumulate,
            compiles=compiles_for(machine) and self.options.compiles,
            rehearses=self.options.rehearses,
            kept_in=outcomes_folder(),
            **asked,
        )


def compiles_for(machine: Machine) -> bool:
    """Return whether a compiler for the machine's devices is installed here."""
    is_tpu = any(link.level in ("chip", "torus") for link in machine.links)
    return is_tpu and has_tpu_compiler()


def devices_for(topology: str, machine: Machine, *, compiles: bool = True) -> str:
    """Return the devices that a step for a machine is lowered for."""
    if compiles and compiles_for(machine):
        return topology
    return f"cpu:{machine.num_devices}"


def efficiencies(rows: Sequence[PlanRow]) -> list[float | None]:
    """Return the speed of a device in each row, against the smallest topology's.

    It is that of the same strategy, in examples a second.
    """
    first: dict[str, PlanRow] = {}
    for row in sorted(rows, key=lambda row: row.num_devices):
        if row.time is not None:
            first.setdefault(row.strategy, row)

    def speed(row: PlanRow) -> float:
        return (row.examples_per_s or 0.0) / row.num_devices

    return [
        None if row.time is None else speed(row) / speed(first[row.strategy])
        for row in rows
    ]


def best_of(rows: Sequence[PlanRow]) -> PlanRow | None:
    """Return the row that the cost model prefers: the fastest of those that may fit."""
    able = [row for row in rows if row.time is not None and row.fits is not False]
    return min(able, key=lambda row: row.time.high_s, default=None)  # pyright: ignore


def nearest_of(rows: Sequence[PlanRow]) -> PlanRow | None:
    """Return the row that lacks the least memory; None if none is known to lack it."""
    lacking = [row for row in rows if row.excess_bytes]
    return min(lacking, key=lambda row: row.excess_bytes or 0, default=None)


def advice(row: PlanRow, others: Iterable[PlanRow]) -> str:
    """Return what to change where a row does not fit.

    Args:
      row: The row.
      others: Rows of the same topology.
    """
    others, ways = list(others), []
    if (best := best_of([each for each in others if each.fits])) is not None:
        ways.append(f"take {best.strategy}, which fits")
    elif (best := best_of(others)) is not None:
        ways.append(f"take {best.strategy}, whose state fits")
    if (fewer := most_examples(row)) is not None:
        pieces = -(-row.outcome.examples // fewer)
        ways.append(
            f"take about {fewer:,} examples instead of {row.outcome.examples:,}, or "
            f"`accumulate={pieces}`"
        )
    if not ways:
        state = readable(row.outcome.state_bytes)
        ways.append(f"take more devices, or cut the state more: it is {state} of each")
    return "; ".join(ways)


def most_examples(row: PlanRow) -> int | None:
    """Estimate the most examples of a batch that fit; None if that is not known.

    What is needed beside the state is taken to grow with the number of examples.
    """
    outcome, limit = row.outcome, row.limit_bytes
    if outcome.memory_bytes is None or limit is None or not outcome.examples:
        return None
    each = (outcome.memory_bytes - outcome.state_bytes) / outcome.examples
    if each <= 0 or limit <= outcome.state_bytes:
        return None
    pieces = outcome.mesh.get("replica", 1) * outcome.mesh.get("shard", 1)
    count = int((limit - outcome.state_bytes) / each) // pieces * pieces
    return count or None
