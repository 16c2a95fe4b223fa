"""Choose a strategy by what was forecast, compiled and measured, step by step.

`decide(state, event)` takes what was found out and returns what to do next. In order:
candidates that do not divide, or cannot fit, are refused; of the others the model's
best are compiled, equal programs once; one update of each is compared with that of the
first of data parallel, zero1 and fsdp; then they are timed in turns, until a bootstrap
(Efron 1979) says that the slower ones cannot win. What fails is left out, with its
reason, and the search goes on. Nothing here runs: `tuning/` does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from replicator.strategies.cost import StepTime
from replicator.strategies.strategy import Strategy

Status = Literal[
    "waiting",
    "does not divide",
    "does not fit",
    "left out",
    "compiled",
    "same program",
    "failed",
    "differs",
    "slower",
    "chosen",
]
"""State of a candidate; `waiting`, `compiled` and `chosen` ones may still win."""

REFERENCES = ("data_parallel", "zero1", "fsdp")
"""Strategies whose first that fits is the standard for one update of the others."""

_ALWAYS = ("data_parallel", "fsdp")  # compiled and timed where they fit
SPARE = 1.05
"""Memory that a program must leave free, as a factor."""

_LEAST_TURNS, _RESAMPLES, _SURE = 3, 1000, 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """What is known of one strategy.

    Attributes:
      name: Call that makes it: `hybrid(shard=4)`.
      strategy: The strategy.
      status: Where it stands.
      why: Reason, where it can no longer win.
      least_bytes: Number of bytes that a device needs at least, by the forecast.
      need_bytes: Number of bytes that it needs, by the compiled program; None until
        then.
      predicted: Predicted seconds of a step; None without figures of the machine.
      bound_s: Seconds that its compiled program seldom goes below, by the forecast.
      link_bytes: Bytes that a device sends in a step, by level of links.
      program: Key of its program; empty until it is compiled.
      gate: Result of the comparison of one update: `"ungated"` where there is none.
      seconds: Seconds of a step, the least of each turn.
    """

    name: str
    strategy: Strategy
    status: Status = "waiting"
    why: str = ""
    least_bytes: int = 0
    need_bytes: int | None = None
    predicted: StepTime | None = None
    bound_s: float = 0.0
    link_bytes: Mapping[str, int] = field(default_factory=dict)
    program: str = ""
    gate: str = ""
    seconds: tuple[float, ...] = ()

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of a step, if nothing overlaps; infinite if not known."""
        return math.inf if self.predicted is None else self.predicted.high_s

    @property
    def least_s(self) -> float:
        """The least seconds of a step that were measured; infinite without any."""
        return min(self.seconds, default=math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """A search for a strategy, between events.

    Attributes:
      candidates: All candidates.
      trials: Number of candidates to time; 0 decides by the model alone.
      turns: Most turns of each.
      memory_bytes: Memory of a device; None if it is not known.
      is_over: Whether there is no time for more.
      has_compiled: Whether no more are compiled, if there is one that fits.
    """

    candidates: tuple[Candidate, ...]
    trials: int = 8
    turns: int = 5
    memory_bytes: float | None = None
    is_over: bool = False
    has_compiled: bool = False

    def of(self, name: str) -> Candidate:
        """Return the candidate of a name."""
        return {each.name: each for each in self.candidates}[name]

    def with_(self, name: str, **changes: object) -> "Search":
        """Return the search with some fields of a candidate changed."""
        changed = (
            replace(each, **changes) if each.name == name else each
            for each in self.candidates
        )
        return replace(self, candidates=tuple(changed))

    def all_of(self, *status: Status) -> list[Candidate]:
        """Return the candidates of these states, in their order."""
        return [each for each in self.candidates if each.status in status]

    @property
    def reference(self) -> Candidate | None:
        """The standard for one update: the first of `REFERENCES` that was compiled."""
        there = {each.name: each for each in self.all_of("compiled")}
        return next(filter(None, map(there.get, REFERENCES)), None)

    def may_fit(self, need_bytes: float) -> bool:
        """Return whether so many bytes fit into a device, with 5 % to spare."""
        return self.memory_bytes is None or need_bytes * SPARE <= self.memory_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """Event: a candidate was compiled; fields are those of `Candidate`."""

    name: str
    program: str
    need_bytes: int | None = None
    predicted: StepTime | None = None
    link_bytes: Mapping[str, int] = field(default_factory=dict)
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Event: one update was compared with that of the reference.

    Attributes:
      name: Name of the candidate.
      result: `"same"`, `"rounding"`, `"differs"`, or `"ungated"` where none could be.
      why: The largest difference; or why there is no comparison.
    """

    name: str
    result: Literal["same", "rounding", "differs", "ungated"]
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Event: a turn of a candidate took so many seconds a step, at the least."""

    name: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateFailed:
    """Event: a candidate failed: memory, compiler, NaN, time limit, a lost process."""

    name: str
    why: str


class NoTimeLeft:
    """Event: there is no time for more."""


class HalfTime:
    """Event: the time for compiling is over."""


Event = Compiled | Checked | Timed | CandidateFailed | HalfTime | NoTimeLeft | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What to do next.

    Attributes:
      verb: `"compile"`, `"check"` one update, `"time"` a turn, or `"end"`.
      name: Name of the candidate; at the end of the chosen one, None if nothing fits.
    """

    verb: Literal["compile", "check", "time", "end"]
    name: str | None = None


def decide(search: Search, event: Event = None) -> tuple[Search, Action]:
    """Take in an event, and return what to do next.

    Args:
      search: The search so far.
      event: What came of the last action; None at the beginning.

    >>> alone = Candidate(name="fsdp", strategy=Strategy(name="fsdp"))
    >>> search, action = decide(Search(candidates=(alone,), trials=0))
    >>> action.verb, action.name
    ('compile', 'fsdp')
    >>> search, action = decide(search, Compiled(name="fsdp", program="a"))
    >>> action.verb, action.name
    ('end', 'fsdp')
    """
    search = _taken(search, event) if event is not None else _sifted(search)
    action = None if search.is_over else _next_compile(search)
    if action is not None:
        return search, action
    if search.trials and not search.is_over:
        search, action = _next_check(search)
        if action is None:
            search, action = _next_turn(search)
        if action is not None:
            return search, action
    return _ended(search)


def _sifted(search: Search) -> Search:
    """Leave out what cannot fit, and what by the model cannot win."""
    for each in search.all_of("waiting"):
        if not search.may_fit(each.least_bytes):
            why = f"its state alone takes {each.least_bytes:,} bytes of a device"
            search = search.with_(each.name, status="does not fit", why=why)
    return search


def _taken(search: Search, event: Event) -> Search:
    match event:
        case Compiled():
            return _compiled(search, event)
        case Checked():
            search = search.with_(event.name, gate=event.result, why=event.why)
            is_right = event.result != "differs"
            return search if is_right else search.with_(event.name, status="differs")
        case Timed():
            seconds = (*search.of(event.name).seconds, event.seconds)
            return search.with_(event.name, seconds=seconds)
        case CandidateFailed():
            return search.with_(event.name, status="failed", why=event.why)
        case HalfTime():
            return replace(search, has_compiled=True)
        case _:
            return replace(search, is_over=True)


def _compiled(search: Search, event: Compiled) -> Search:
    search = search.with_(
        event.name,
        status="compiled",
        program=event.program,
        need_bytes=event.need_bytes,
        predicted=event.predicted,
        link_bytes=event.link_bytes,
    )
    for other in search.candidates:
        if other.name != event.name and other.program == event.program:
            why = f"as {other.name}"
            return search.with_(event.name, status="same program", why=why)
    if event.need_bytes is not None and not search.may_fit(event.need_bytes):
        assert search.memory_bytes is not None, "all fits where it is not known"
        over = event.need_bytes * SPARE - search.memory_bytes
        why = f"{over:,.0f} bytes too many{event.remedy}"
        return search.with_(event.name, status="does not fit", why=why)
    return search


def _next_compile(search: Search) -> Action | None:
    """Return the next to compile; none once no other can be the model's best."""
    waiting = search.all_of("waiting")
    first = [each for each in waiting if each.name in _ALWAYS]
    if first:
        return Action(verb="compile", name=first[0].name)
    if not waiting:
        return None
    fitting = search.all_of("compiled", "slower")
    if fitting and search.has_compiled:
        return None
    best_s = min((each.predicted_s for each in fitting), default=math.inf)
    following = min(waiting, key=lambda each: (each.bound_s, *_order(each)))
    may_win = following.bound_s < best_s
    if fitting and best_s == math.inf:  # without figures bytes rank
        may_win = _order(following)[1] < min(_order(each)[1] for each in fitting)
    if may_win or len(fitting) < max(search.trials, 1):
        return Action(verb="compile", name=following.name)
    return None


def _entered(search: Search) -> list[Candidate]:
    """Return the candidates that are compared and timed: the best by the model.

    Data parallel and fsdp are among them, unless it is only one or two.
    """
    always = _ALWAYS if search.trials > len(_ALWAYS) else ()
    fitting = search.all_of("compiled", "slower")
    fitting.sort(key=lambda each: (each.name not in always, *_order(each)))
    return [each for each in fitting[: search.trials] if each.status == "compiled"]


def _order(candidate: Candidate) -> tuple[float, float, float]:
    """Order by what the model says; without figures by bytes that are sent."""
    sent = sum(candidate.link_bytes.values())
    return candidate.predicted_s, sent, candidate.least_bytes


def _next_check(search: Search) -> tuple[Search, Action | None]:
    for each in _entered(search):
        if each.gate:
            continue
        if search.reference is None:
            search = search.with_(each.name, gate="ungated")
        elif each.name == search.reference.name:
            search = search.with_(each.name, gate="reference")
        else:
            return search, Action(verb="check", name=each.name)
    return search, None


def _next_turn(search: Search) -> tuple[Search, Action | None]:
    running = _entered(search)
    turns = [len(each.seconds) for each in running]
    if not running or (len(running) == 1 and turns[0] >= 1):
        return search, None
    if min(turns) == max(turns) >= _LEAST_TURNS:
        search = _losers_left_out(search, running)
        running = _entered(search)
        if len(running) == 1 or min(turns) >= search.turns:
            return search, None
    following = min(running, key=lambda each: len(each.seconds))
    return search, Action(verb="time", name=following.name)


def _losers_left_out(search: Search, running: Sequence[Candidate]) -> Search:
    best = min(running, key=lambda each: each.least_s)
    for each in running:
        if each is not best and cannot_win(each.seconds, best.seconds):
            ratio = float(np.median(each.seconds) / np.median(best.seconds))
            why = f"{ratio:.2f} x the best"
            search = search.with_(each.name, status="slower", why=why)
    return search


def cannot_win(seconds: Sequence[float], best: Sequence[float]) -> bool:
    """Return whether one took longer than the best with 95 % confidence.

    Turns are resampled; the ratio of the medians must be above 1 in 95 % of them.

    Args:
      seconds: Seconds of a step in each turn.
      best: The same of the best.

    >>> cannot_win([2.0, 2.1, 2.2], [1.0, 1.1, 1.2])
    True
    >>> cannot_win([1.0, 1.2, 1.1], [1.0, 1.1, 1.2])
    False
    """
    draw = np.random.default_rng(0)

    def medians(values: Sequence[float]) -> np.ndarray:
        found = draw.choice(np.asarray(values), (_RESAMPLES, len(values)))
        return np.median(found, axis=1)

    return bool(np.quantile(medians(seconds) / medians(best), _SURE) > 1)


def _ended(search: Search) -> tuple[Search, Action]:
    running = _entered(search) if search.trials else search.all_of("compiled")
    timed = [each for each in running if each.seconds]
    for each in search.all_of("waiting", "compiled"):
        why = "no trial was left" if each.predicted is None else "by the model slower"
        why = "there was no time" if search.is_over else why
        if each.status == "waiting" or (timed and not each.seconds):
            search = search.with_(each.name, status="left out", why=why)
        elif not each.gate:
            search = search.with_(each.name, gate="ungated")
    if not running:
        return search, Action(verb="end")
    best = _best_of(timed) if timed else min(running, key=_order)
    return search.with_(best.name, status="chosen"), Action(verb="end", name=best.name)


def _best_of(timed: Sequence[Candidate]) -> Candidate:
    """Return the fastest; data parallel, the simplest, where it may be as fast."""
    best = min(timed, key=lambda each: each.least_s)
    for each in timed:
        if each.name == REFERENCES[0] and not cannot_win(each.seconds, best.seconds):
            return each
    return best
