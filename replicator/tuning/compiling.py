"""Compile a step in a process of its own, which may run out of time, or die."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replicator.distributed.child import ChildEnd, ask_child
from replicator.errors import ArgumentError
from replicator.strategies.builders import Builder
from replicator.strategies.strategy import Strategy
from replicator.tuning.outcome import CompileOutcome
from replicator.tuning.problem import ProblemFile, ProblemFn

_PROGRAM = "replicator.tuning.compiler_process"
_DEFAULT_LIMIT_S = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOrder:
    """A step to compile for one strategy and one set of devices.

    Attributes:
      problem: Place of the function that returns the problem, or the function: it is
        sent by cloudpickle.
      make_replicator: `Replicator`; it is called with `devices` and `strategy`.
      strategy: The strategy; None for a replica on each device.
      devices: `"v5e:16x16"`: a topology, by libtpu. `"cpu:8"`: so many fake devices.
        `"gpu:8"`: the first of those that JAX finds.
      accumulate: Number of microbatches of an update.
      compiles: Whether to compile, or only to trace and forecast.
      kept_in: Folder of results by program, which are looked up before compiling; None
        for none.
    """

    problem: ProblemFile | ProblemFn
    make_replicator: Callable[..., Any]
    strategy: Strategy | Builder | None
    devices: str
    accumulate: int = 1
    compiles: bool = True
    kept_in: str | None = None


def compile_step(
    order: CompileOrder, *, limit_s: float = _DEFAULT_LIMIT_S
) -> CompileOutcome:
    """Compile a step in a process of its own, and wait for it.

    Nothing that the compiler does raises here: it is in the outcome.

    Args:
      order: What to compile.
      limit_s: Seconds after which the process is ended.

    Raises:
      ArgumentError: `problem` does not return a problem.
    """
    began_s = time.monotonic()
    answer = ask_child(_PROGRAM, order, limit_s=limit_s)
    if isinstance(answer, ChildEnd):
        return CompileOutcome(
            status="timeout" if answer.is_late else "died",
            reason=answer.why,
            seconds=round(time.monotonic() - began_s, 1),
        )
    outcome = CompileOutcome.from_json(answer)
    if outcome.status == "problem":
        raise ArgumentError(outcome.reason)
    return outcome
