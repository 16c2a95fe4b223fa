"""Rehearse right steps on many faked devices, and steps that XLA cuts wrongly.

`failures`: of a character model, a ResNet and a mixture of experts under `fsdp`,
`hybrid` and tensor parallelism on 64 and 256 faked devices, those that are not told to
be those of one device. `missed`: of the writes, shifts and grouped convolutions that
XLA's partitioner is known to make wrong, with the guards that keep them right taken
out, those that a rehearsal lets pass and that are wrong by `benchmarks.first_update`;
`found` is the number of those that it finds. Each has a process of its own, one at a
time.
"""

import json
import time
from typing import NamedTuple

from absl import app, flags

import replicator
from benchmarks import worker
from benchmarks.first_update.faults import PATTERNS, ROUTES, is_possible
from benchmarks.first_update.judge import Setting
from benchmarks.rehearse.problems import PROBLEMS, strategy_of
from benchmarks.rehearse.unguarded import problem_of
from replicator import strategies
from replicator.strategies import Strategy
from replicator.tuning.problem import ProblemFn
from replicator.tuning.rehearsal import Rehearsal
from replicator.tuning.rehearse import RehearsalOrder, rehearse

_FULL = flags.DEFINE_bool("full", False, "All routes of all patterns.")
_ONLY = flags.DEFINE_multi_string("only", [], "Those whose words hold this.")
_LIMIT_S = flags.DEFINE_float("limit_s", 240.0, "What one rehearsal may take.")

_DEVICES = (64, 256)
_STRATEGIES = ("fsdp", "hybrid", "tensor_parallel")
_FAULTY_DEVICES = 8
# Where a pattern comes from and goes to; the state of the step for all others.
_ROUTES = {
    "next-values": "batch to loss",
    "stencil": "activation to state",
    "next-roll": "activation to loss",
    "twice-flip": "gradient",
    "twice-cumsum": "parameter to loss",
}


class Case(NamedTuple):
    """A rehearsal of a right step.

    Attributes:
      problem: Of `PROBLEMS`.
      strategy: Of `_STRATEGIES`.
      devices: Number of faked devices.
    """

    problem: str
    strategy: str
    devices: int

    def __str__(self) -> str:
        """Write it as `experts under fsdp on 64 devices`."""
        return f"{self.problem} under {self.strategy} on {self.devices} devices"


def cases() -> list[Case]:
    """List the right steps that are asked for."""
    every = [Case(p, s, n) for n in _DEVICES for p in PROBLEMS for s in _STRATEGIES]
    return [each for each in every if _is_asked(f"sound {each}")]


def faults() -> list[Setting]:
    """List the steps that are wrong: a route of each pattern, or all routes."""
    every = [
        Setting("fault", f"{pattern}/{route}", _way(pattern), "adamw")
        for pattern in PATTERNS
        for route in (ROUTES if _FULL.value else [_ROUTES.get(pattern, "state")])
        if is_possible(pattern, route)
    ]
    return [each for each in every if _is_asked(f"fault {each}")]


def _way(pattern: str) -> str:
    return "fsdp" if pattern == "clipped" else "zero2"


def _is_asked(words: str) -> bool:
    return all(word in words for word in _ONLY.value)


def _rehearsed(what: object, problem: ProblemFn, strategy: Strategy, devices: int):
    order = RehearsalOrder(
        problem=problem,
        make_replicator=replicator.Replicator,
        strategy=strategy,
        devices=devices,
    )
    found = rehearse(order, limit_s=_LIMIT_S.value)
    print(f"{what} ({found.seconds:.0f} s): {found}", flush=True)
    return found


def _missed(asked: list[Setting]) -> tuple[int, int]:
    """Return how many a rehearsal finds wrong, and how many wrong ones it lets pass."""
    passed = []
    for each in asked:
        problem = problem_of(*each.case.split("/"))
        strategy = getattr(strategies, each.builder)(whole_below_bytes=0)
        found = _rehearsed(each, problem, strategy, _FAULTY_DEVICES)
        if found.status != "differs":
            passed.append(each)
    judge = worker.Worker(["-m", "benchmarks.first_update", "--serve"], timeout_s=300)
    wrong = [each for each in passed if judge.ask(each)["wrong"]]
    judge.close()
    return len(asked) - len(passed), len(wrong)


def is_right(found: Rehearsal) -> bool:
    """Return whether a rehearsal shows a step that is cut, and right."""
    return found.status == "ok" and found.cut > 0


def main(argv: list[str]) -> None:
    del argv
    began_s = time.monotonic()
    asked, failures = cases(), 0
    for case in asked:
        strategy = strategy_of(case.strategy, case.problem, case.devices)
        problem = PROBLEMS[case.problem][0]
        failures += not is_right(_rehearsed(case, problem, strategy, case.devices))
    found, missed = _missed(faults())
    result = {
        "failures": failures,
        "rehearsed": len(asked),
        "missed": missed,
        "found": found,
        "seconds": round(time.monotonic() - began_s),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
