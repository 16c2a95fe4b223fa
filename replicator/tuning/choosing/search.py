"""Find the strategy for a step: forecast, compile, compare, time, and decide.

`strategies/choose.py` decides what comes next; this does it. On the fake devices of a
CPU a process of its own compiles and times (`elsewhere.py`). Accelerators
belong to one process: there this one does both, after the compiled memory fits with 5 %
to spare, and the name of what it tries is on disk meanwhile, so that the next start
leaves out what has ended a process. Of several processes each does the same, and the
first one's numbers count in all.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from replicator.base.mesh import spans_processes
from replicator.distributed.agreement import exchange
from replicator.engine.memory import larger_divisors, may_fit
from replicator.engine.memory import memory_limit_bytes as limit_of
from replicator.errors import (
    ArgumentError,
    check_count,
    check_flags,
    check_kind,
    check_positive,
    check_whole,
)
from replicator.strategies.choose import (
    SPARE,
    Action,
    Candidate,
    CandidateFailed,
    Compiled,
    Event,
    HalfTime,
    NoTimeLeft,
    Search,
    Timed,
    decide,
)
from replicator.strategies.cost import bytes_by_level
from replicator.strategies.hardware import Hardware
from replicator.strategies.machine import Link, Machine
from replicator.strategies.rule import Partition
from replicator.strategies.strategy import Strategy
from replicator.tuning.choosing.attempts import Attempts, without_ended
from replicator.tuning.choosing.candidates import (
    Work,
    candidates_for,
    predicted,
    strategies_for,
)
from replicator.tuning.choosing.decision import Decision
from replicator.tuning.choosing.elsewhere import ElsewhereMeasurer
from replicator.tuning.choosing.measuring import CompiledStrategy, Measurer
from replicator.tuning.choosing.refusals import (
    fitting_microbatches,
    nothing_fits,
    too_many,
)
from replicator.tuning.choosing.subject import Subject

_log = logging.getLogger(__name__)

_SHARE = 0.25  # of the time, for one answer: others must have theirs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChoosingOptions:
    """Options of a choice; `replicator.choose` describes them."""

    machine: Machine | None = None
    candidates: Sequence[Strategy] | None = None
    tensor_rules: Mapping[str, Partition] | None = None
    lossy: bool = False
    trials: int = 8
    memory_limit_bytes: int | None = None
    limit_s: float = 600.0

    def __post_init__(self) -> None:
        check_kind("machine", self.machine, Machine)
        _check_candidates(self.candidates)
        check_flags(lossy=self.lossy)
        check_whole("trials", self.trials)
        if self.trials < 0:
            raise ArgumentError(
                f"`trials` must be at least 0, got {self.trials}. Pass 0 to decide by "
                "the model alone."
            )
        check_positive("limit_s", self.limit_s, "Leave it out for ten minutes.")
        if self.memory_limit_bytes is not None:
            check_count("memory_limit_bytes", self.memory_limit_bytes)


class Choosing:
    """One search for a strategy.

    Attributes:
      work: Work of the step, once the search has begun.
      is_here: Whether this process compiles, and no other that could be ended.

    Args:
      subject: The step.
      devices: The devices, as replicas.
      options: Options.
      note: Takes a line on what is done next.

    Raises:
      ArgumentError: The machine has another number of devices, or its figures are
        needed and not known.
    """

    def __init__(
        self,
        subject: Subject,
        devices: Mesh,
        options: ChoosingOptions,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._note = note
        self._subject, self._devices, self._options = subject, devices, options
        self._together = spans_processes(devices)
        # Hosts may have measured figures of their own.
        machine = _machine(subject.decision, options)
        plain = self._exchanged("machine", dataclasses.asdict(machine))[0]
        self._machine = _with_figures(machine, plain)
        _check_figures(self._machine, options)
        memory_bytes = _memory_bytes(devices, self._machine, options)
        every = self._exchanged("memory", memory_bytes)
        self._memory_bytes = min(filter(None, every), default=None)
        self._until_s = time.monotonic() + options.limit_s
        self._compile_s = 0.0  # of the last that was compiled
        self.work: Work | None = None
        self.is_here = True

    def search(self) -> Search:
        """Return the search with all of it done."""
        measurer = self._measurer()
        self.is_here = isinstance(measurer, Measurer)
        try:
            return self._searched(measurer)
        finally:
            if isinstance(measurer, ElsewhereMeasurer):
                measurer.close()

    @property
    def machine(self) -> Machine:
        """The machine."""
        return self._machine

    def _measurer(self) -> Measurer | ElsewhereMeasurer:
        here = Measurer(self._subject, self._devices)
        is_cpu = self._devices.devices.flat[0].platform == "cpu"
        if is_cpu and not self._together:
            try:
                return ElsewhereMeasurer(
                    self._subject,
                    self._devices,
                    limit_s=self._options.limit_s * _SHARE,
                    until_s=self._until_s,
                )
            except Exception as failure:  # of the user's objects, of any kind
                _log.warning(
                    "Strategies are tried in this process, as the step cannot be "
                    "sent to another: %s",
                    failure,
                )
        return here

    def _searched(self, measurer: Measurer | ElsewhereMeasurer) -> Search:
        work = self.work = measurer.work()
        strategies = self._strategies()
        attempts = Attempts(
            work, self._machine, there=isinstance(measurer, ElsewhereMeasurer)
        )
        found = candidates_for(strategies, work, self._machine)
        ended = {
            n
            for names in self._exchanged("ended", sorted(attempts.ended))
            for n in names
        }
        search = Search(
            candidates=without_ended(found, ended),
            trials=self._options.trials,
            memory_bytes=self._memory_bytes,
        )
        if ended:
            _log.warning(
                "Strategies are left out that ended the process that tried them (%s). "
                "Delete %s to try them again.",
                *(", ".join(sorted(ended)), attempts.files),
            )
        search, action = decide(search)
        while action.verb != "end":
            self._note(f"{action.verb} {action.name}")
            with attempts.noted(action.name):
                event = self._done(measurer, search, action, work.examples)
            event = self._agreed(event)
            self._require_time(search, event)
            search, action = decide(search, event)
        if action.name is None:
            raise nothing_fits(search, self._microbatches(measurer, work.examples))
        return search

    def _strategies(self) -> dict[str, Strategy]:
        if self._options.candidates is None:
            return strategies_for(
                self._machine,
                tensor_rules=self._options.tensor_rules,
                rules=self._subject.obeys_rules,
                lossy=self._options.lossy,
            )
        found: dict[str, Strategy] = {}
        for each in self._options.candidates:
            each = each.for_hosts(self._machine.devices_per_host)
            sizes = {"shard": each.shard, "model": each.model, "replica": each.replica}
            cut = [f"{n}={size}" for n, size in sizes.items() if (size or 1) > 1]
            name = f"{each.name}({', '.join(cut)})" if cut else each.name
            number = sum(other.partition(" #")[0] == name for other in found)
            found[f"{name} #{number + 1}" if number else name] = each
        return found

    def _done(
        self,
        measurer: Measurer | ElsewhereMeasurer,
        search: Search,
        action: Action,
        examples: int,
    ) -> Event:
        """Do what was decided; return what came of it."""
        # By the first process's clock: all do the same, or one waits in a collective.
        left_s = self._exchanged("left", self._until_s - time.monotonic())[0]
        if left_s <= 0:
            return NoTimeLeft()
        fits = search.all_of("compiled", "slower") and not search.has_compiled
        if action.verb == "compile" and fits and left_s < self._options.limit_s / 2:
            return HalfTime()
        name = action.name
        assert name is not None, "only an end has no name"
        if action.verb == "time":
            return measurer.time(name)
        if action.verb == "check":
            assert search.reference is not None, "a check has a reference"
            return measurer.check(name, search.reference.name)
        found = measurer.compile(name, search.of(name).strategy)
        if not isinstance(found, CompiledStrategy):
            return found
        self._compile_s = found.seconds
        return Compiled(
            name=name,
            program=found.program,
            need_bytes=None if found.need is None else found.need.total_bytes,
            predicted=predicted(found.features, self._machine),
            link_bytes=bytes_by_level(found.features, self._machine),
            remedy=self._remedy(found, examples),
        )

    def _require_time(self, search: Search, event: Event) -> None:
        """Refuse more candidates than fit in the time, once the first is compiled."""
        asked = self._options.candidates
        if asked is None or not isinstance(event, Compiled):
            return
        if any(each.program for each in search.candidates):
            return
        seconds = self._exchanged("compiled", self._compile_s)[0]
        if failure := too_many(len(asked), seconds, self._options.limit_s):
            raise failure

    def _remedy(self, found: CompiledStrategy, examples: int) -> str:
        """Propose accumulation, and remat: neither is set."""
        if found.need is None or self._memory_bytes is None:
            return ""
        parts = found.features.num_devices
        choices = [
            k
            for k in larger_divisors(max(examples // parts, 1), 1)
            if may_fit(found.need, self._memory_bytes / SPARE, k)
        ]
        if not choices:
            return ""
        return f"; accumulate={choices[0]}, or `jax.checkpoint`, may fit"

    def _agreed(self, event: Event) -> Event:
        """Return the first process's event; a failure in any process is one in all."""
        if not self._together or event is None:
            return event
        if isinstance(event, NoTimeLeft | HalfTime):
            return event
        seconds = event.seconds if isinstance(event, Timed) else None
        why = event.why if isinstance(event, CandidateFailed) else None
        found = self._exchanged("event", [why, seconds])
        for reason, _ in found:
            if reason is not None:
                return CandidateFailed(name=event.name, why=reason)
        if isinstance(event, Timed):
            return Timed(name=event.name, seconds=found[0][1])
        return event

    def _microbatches(
        self, measurer: Measurer | ElsewhereMeasurer, examples: int
    ) -> Callable[[Candidate, float], str]:
        def need_of(nearest: Candidate, k: int) -> int | None:
            tried = measurer.compile(nearest.name, nearest.strategy, accumulate=k)
            need = tried.need if isinstance(tried, CompiledStrategy) else None
            return None if need is None else need.total_bytes

        each = examples // self._devices.size
        return fitting_microbatches(need_of, each, self._until_s)

    def _exchanged(self, name: str, value: Any) -> list[Any]:
        return exchange(f"choose/{name}", value) if self._together else [value]


def _check_candidates(candidates: Sequence[Strategy] | None) -> None:
    if candidates is None:
        return
    is_list = isinstance(candidates, list | tuple)
    if (
        not is_list
        or not candidates
        or not all(isinstance(each, Strategy) for each in candidates)
    ):
        raise ArgumentError(
            f"`candidates` must be a list of strategies, got {candidates!r}. Write "
            "`[strategies.data_parallel(), strategies.fsdp()]`, or leave it out."
        )


def _machine(decision: Decision, options: ChoosingOptions) -> Machine:
    devices = decision.devices
    assert devices is not None, "the devices are here"
    machine = options.machine or Machine.from_devices(list(devices.devices.flat))
    named = None if options.machine is not None else decision.machine
    if named is not None and named.num_devices == devices.size:
        machine = named if named.hardware else named.with_figures_of(machine)
    if machine.num_devices != devices.size:
        raise ArgumentError(
            f"`machine` must have the {devices.size} devices that are there, got "
            f"{machine.name} with {machine.num_devices}. Leave it out, or use "
            "`replicator.fake_devices`."
        )
    return machine


def _with_figures(machine: Machine, plain: Mapping[str, Any]) -> Machine:
    """Return a machine with links and figures of another, which is plain data."""
    links = tuple(
        Link(**{**each, "torus": tuple(each["torus"]), "wraps": tuple(each["wraps"])})
        for each in plain["links"]
    )
    figures = plain["hardware"]
    hardware = None if figures is None else Hardware(**figures)
    return dataclasses.replace(machine, links=links, hardware=hardware)


def _check_figures(machine: Machine, options: ChoosingOptions) -> None:
    if machine.hardware is None and options.trials == 0:
        raise ArgumentError(
            f"`trials` must be at least 1 for {machine.name}, whose figures are not "
            "known, got 0. Run `replicator devices --calibrate`, or pass a `machine`."
        )


def _memory_bytes(
    devices: Mesh, machine: Machine, options: ChoosingOptions
) -> float | None:
    if options.memory_limit_bytes is not None:
        return options.memory_limit_bytes
    if options.machine is None and (there := limit_of(devices.local_devices)):
        return there
    return None if machine.hardware is None else machine.hardware.memory_bytes
