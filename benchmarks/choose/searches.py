"""Searches by the model alone, over programs compiled once for all machines."""

import dataclasses
import functools

import jax

from benchmarks.choose.models import Model
from replicator.base.mesh import replica_mesh
from replicator.strategies.choose import (
    Candidate,
    CandidateFailed,
    Compiled,
    Search,
    decide,
)
from replicator.strategies.cost import bytes_by_level
from replicator.strategies.machine import Machine
from replicator.strategies.strategy import Strategy
from replicator.tuning.choosing.candidates import (
    Work,
    candidates_for,
    predicted,
    strategies_for,
)
from replicator.tuning.choosing.measuring import CompiledStrategy, Measurer


class Programs:
    """The programs of a model under any strategy, on the fake devices that are there.

    Args:
      model: The model.
    """

    def __init__(self, model: Model) -> None:
        mesh = replica_mesh(devices=jax.devices())
        self._measurer = Measurer(model.subject(), mesh)
        self._found: dict[str, CompiledStrategy | CandidateFailed] = {}

    @functools.cached_property
    def work(self) -> Work:
        """Work of the step."""
        return self._measurer.work()

    def compiled(
        self, name: str, strategy: Strategy
    ) -> CompiledStrategy | CandidateFailed:
        """Return what compiling showed, the first time or now."""
        known = f"{name} {strategy.devices_per_host}"
        if known not in self._found:
            self._found[known] = self._measurer.compile(name, strategy)
        return self._found[known]


@functools.cache
def programs_of(model: Model) -> Programs:
    """Return the programs of a model."""
    return Programs(model)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model on a machine.

    Attributes:
      model: The model.
      machine: The machine.
      memory_bytes: Memory of a device; that of the machine by default.
      lossy: Whether gradients may travel in narrow forms.
      tensor: Whether `tensor_parallel` is a candidate.
    """

    model: Model
    machine: Machine
    memory_bytes: float | None = None
    lossy: bool = False
    tensor: bool = True


def candidates_of(case: Case) -> tuple[Candidate, ...]:
    """Return the candidates of a case, with their forecasts."""
    strategies = strategies_for(
        case.machine,
        tensor_rules=case.model.tensor_rules if case.tensor else None,
        rules=True,
        lossy=case.lossy,
    )
    return candidates_for(strategies, programs_of(case.model).work, case.machine)


def search(case: Case) -> Search:
    """Return the search of a case, decided by the model alone."""
    found, action = decide(_begun(case))
    while action.verb != "end":
        assert action.verb == "compile", "nothing is timed"
        assert action.name is not None, "only an end has no name"
        event = _event(case, found.of(action.name))
        found, action = decide(found, event)
    return found


def exhaustive_best_s(case: Case) -> float:
    """Return the least seconds that the model predicts for any candidate that fits."""
    begun = _begun(case)
    events = [_event(case, each) for each in begun.all_of("waiting")]
    return min(
        event.predicted.high_s
        for event in events
        if isinstance(event, Compiled) and event.predicted is not None
        if event.need_bytes is None or begun.may_fit(event.need_bytes)
    )


def _begun(case: Case) -> Search:
    hardware = case.machine.hardware
    limit = case.memory_bytes or (hardware and hardware.memory_bytes)
    return Search(candidates=candidates_of(case), trials=0, memory_bytes=limit)


def _event(case: Case, candidate: Candidate) -> Compiled | CandidateFailed:
    found = programs_of(case.model).compiled(candidate.name, candidate.strategy)
    if isinstance(found, CandidateFailed):
        return found
    return Compiled(
        name=candidate.name,
        program=found.program,
        need_bytes=None if found.need is None else found.need.total_bytes,
        predicted=predicted(found.features, case.machine),
        link_bytes=bytes_by_level(found.features, case.machine),
    )
