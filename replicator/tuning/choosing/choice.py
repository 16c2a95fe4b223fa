"""A choice of a strategy: the winner, and for each other candidate why not."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replicator.base.out_of_memory import readable
from replicator.strategies.choose import Candidate
from replicator.strategies.strategy import Strategy
from replicator.strategies.table import aligned

_LONGEST = 46


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """A strategy, chosen among candidates; `print` it for a table of them.

    Attributes:
      candidates: All candidates, with what was found out.
      chosen: The best of them.
      machine: Name of the machine.
      num_devices: Number of its devices.
      trials: Most candidates that were to be timed; 0 if the model alone decided.
      is_here: Whether this process compiled: `limit_s` then ends no compiler.
      replicator: A `Replicator` under the chosen strategy; None within a run.
    """

    candidates: tuple[Candidate, ...]
    chosen: Candidate
    machine: str
    num_devices: int
    trials: int
    is_here: bool = False
    replicator: Any = None

    @property
    def strategy(self) -> Strategy:
        """The chosen strategy."""
        return self.chosen.strategy

    @property
    def is_measured(self) -> bool:
        """Whether the chosen one was timed."""
        return bool(self.chosen.seconds)

    @property
    def summary(self) -> str:
        """What was chosen, of how many, and what came next by the model: a line."""
        count = len(self.candidates)
        line = f"{self.chosen.name} of {count} candidate{'s' * (count > 1)}"
        if self.chosen.predicted is None:
            return line
        others = [each for each in self.candidates if each.status in _MIGHT_WIN]
        line += f", predicted {_seconds(self.chosen.predicted_s)} a step"
        if not others:
            return line
        following = min(others, key=lambda each: each.predicted_s)
        return f"{line}; next {following.name}, {_seconds(following.predicted_s)}"

    def as_json(self) -> Mapping[str, Any]:
        """Return the decision in plain JSON, for records."""
        return {
            "chosen": self.chosen.name,
            "strategy": self.strategy.as_json(),
            "devices": self.num_devices,
            "machine": self.machine,
            "measured_s": self.chosen.least_s if self.is_measured else None,
            "candidates": [_plain(each) for each in self.candidates],
        }

    def __str__(self) -> str:
        """Return a table, the chosen one first."""
        columns = ("strategy", "bytes/device", "predicted", "measured", "sends", "why")
        rows = [*map(_row, sorted(self.candidates, key=_place))]
        # Of a CPU without figures nothing is predicted, without trials none is timed.
        shown = [n for n in range(len(columns)) if any(row[n] for row in rows)]
        numbers = [place for place, n in enumerate(shown) if n in (1, 2, 3)]
        table = [[row[n] for n in shown] for row in (columns, *rows)]
        how = "timed" if self.is_measured else "unmeasured: by the model alone"
        how += "; compiled in this process" if self.is_here else ""
        head = f"{self.chosen.name} on {self.num_devices} x {self.machine} ({how})"
        return "\n".join([head, *aligned(table, numbers=numbers)])


_MIGHT_WIN = ("slower", "compiled", "left out")
_RANK = ("chosen", "slower", "compiled", "same program", "left out", "waiting")


def _place(candidate: Candidate) -> tuple[int, float]:
    is_ranked = candidate.status in _RANK
    rank = _RANK.index(candidate.status) if is_ranked else len(_RANK)
    # What was timed comes first, by its time.
    rank = min(rank, 1) if candidate.seconds and candidate.status != "chosen" else rank
    return rank, candidate.least_s


def _row(candidate: Candidate) -> tuple[str, ...]:
    predicted = candidate.predicted
    sent = [f"{readable(n)} {level}" for level, n in candidate.link_bytes.items() if n]
    size = candidate.need_bytes or candidate.least_bytes
    about, text = "" if candidate.need_bytes else ">", reason_of(candidate)
    return (
        candidate.name,
        f"{about}{readable(size)}" if size else "",
        "" if predicted is None else _seconds(predicted.high_s),
        _seconds(candidate.least_s),
        ", ".join(sent),
        text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "...",
    )


def reason_of(candidate: Candidate) -> str:
    """Return what became of a candidate, and why."""
    gate = candidate.gate if candidate.gate in ("ungated", "rounding") else ""
    parts = [candidate.status, gate, candidate.why]
    if candidate.status == "compiled":
        parts[0] = "timed" if candidate.seconds else "fits"
    if candidate.status == "same program":
        parts = [f"the program of {candidate.why.removeprefix('as ')}"]
    return ": ".join(part for part in parts if part)


def _seconds(seconds: float) -> str:
    if not math.isfinite(seconds):
        return ""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _plain(candidate: Candidate) -> dict[str, Any]:
    plain = dataclasses.asdict(candidate)
    del plain["strategy"], plain["predicted"]
    found = candidate.predicted
    plain["predicted_s"] = None if found is None else found.high_s
    return plain
