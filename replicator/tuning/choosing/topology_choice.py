"""Choose a strategy for a topology that need not be there: by the model, no trials.

The candidates, and what decides among them, are those of `choose(trials=0)`; each that
is compiled is a row of a plan.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

from replicator.errors import ArgumentError, DeviceMemoryError
from replicator.strategies.choose import (
    Action,
    Candidate,
    CandidateFailed,
    Compiled,
    Event,
    Search,
    decide,
)
from replicator.strategies.cost import bytes_by_level
from replicator.strategies.machine import Machine
from replicator.tuning.choosing.candidates import (
    Work,
    candidates_for,
    strategies_for,
)
from replicator.tuning.choosing.choice import Choice
from replicator.tuning.choosing.refusals import fitting_microbatches, nothing_fits
from replicator.tuning.named import NamedStrategy
from replicator.tuning.plan import Planner, PlanRow, compiles_for, most_examples


class TopologyChoice:
    """The choice for one topology, once its rows are known.

    Attributes:
      topology: The topology.
      choice: What was chosen; None if nothing was.
      refusal: Why nothing was chosen; None otherwise, and before.

    Args:
      planner: Makes the rows.
      topology: The topology.

    Raises:
      ArgumentError: The topology does not exist.
    """

    def __init__(self, planner: Planner, topology: str) -> None:
        self.topology = topology
        self.choice: Choice | None = None
        self.refusal: ArgumentError | DeviceMemoryError | None = None
        self._planner = planner
        self._machine = Machine.from_topology(topology)

    def rows(self) -> Iterator[PlanRow]:
        """Yield a row for each strategy that is compiled, when it is known; decide.

        Raises:
          ArgumentError: The problem is none.
        """
        begun = self._planner.work(self.topology)
        if begun.work is None:
            self.refusal = ArgumentError(
                "`problem` must have a step that one device can trace, got "
                f"{begun.status}: {begun.reason}. Mend it, or raise `--limit`."
            )
            return
        search, action = decide(self._begun(begun.work, begun.limit_bytes))
        while action.verb == "compile":
            assert action.name is not None, "only an end has no name"
            candidate = search.of(action.name)
            row = self._row(candidate)
            yield row
            search, action = decide(search, self._event(row, candidate))
        self._end(search, action, begun.work.examples)

    def _end(self, search: Search, action: Action, examples: int) -> None:
        if action.name is None:
            until_s = time.monotonic() + self._planner.options.limit_s
            each = examples // self._machine.num_devices
            find = fitting_microbatches(self._need_of, each, until_s)
            self.refusal = nothing_fits(search, find)
            return
        self.choice = Choice(
            candidates=search.candidates,
            chosen=search.of(action.name),
            machine=self.topology,
            num_devices=self._machine.num_devices,
            trials=0,
        )

    def _begun(self, work: Work, limit_bytes: float | None) -> Search:
        strategies = strategies_for(self._machine, rules=True)
        found = candidates_for(strategies, work, self._machine)
        if not (compiles_for(self._machine) and self._planner.options.compiles):
            # No compiler joins collectives: the forecast is the last word.
            found = tuple(replace(each, bound_s=each.predicted_s) for each in found)
        hardware = self._machine.hardware
        published = None if hardware is None else hardware.memory_bytes
        memory_bytes = limit_bytes or published
        return Search(candidates=found, trials=0, memory_bytes=memory_bytes)

    def _row(self, candidate: Candidate, accumulate: int | None = None) -> PlanRow:
        named = NamedStrategy(candidate.name, candidate.strategy)
        return self._planner.row(self.topology, named, accumulate=accumulate)

    def _need_of(self, candidate: Candidate, accumulate: int) -> int | None:
        row = self._row(candidate, accumulate)
        return row.outcome.memory_bytes if row.fits else None

    def _event(self, row: PlanRow, candidate: Candidate) -> Event:
        outcome, need = row.outcome, row.outcome.memory_bytes
        if outcome.status == "memory" and row.limit_bytes is not None:
            # The compiler has the last word; it does not always say how much.
            need = max(need or 0, round(row.limit_bytes))
        elif outcome.status not in ("compiled", "memory", "forecast"):
            why = f"{outcome.status}: {outcome.reason}"
            return CandidateFailed(name=row.strategy, why=why)
        sent = candidate.link_bytes
        if outcome.features is not None:
            sent = bytes_by_level(outcome.features, self._machine)
        fewer = most_examples(row)
        pieces = None if fewer is None else -(-outcome.examples // fewer)
        return Compiled(
            name=row.strategy,
            program=outcome.key,
            need_bytes=need,
            predicted=row.time or candidate.predicted,
            link_bytes=sent,
            remedy=f"; `accumulate={pieces}`, or `jax.checkpoint`, may fit"
            if pieces
            else "",
        )
