"""Rehearse a plan: make a step's first updates on as many faked devices.

XLA's partitioner is wrong for some programs on some meshes, and it is the same for all
devices. So the first two updates of the step, at small sizes, are made on as many faked
devices as are planned, in a process of their own, and compared with one device as the
check of first updates does.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from replicator.distributed.child import ChildEnd, ask_child
from replicator.errors import ArgumentError, check_count
from replicator.strategies.machine import Machine
from replicator.strategies.strategy import Strategy
from replicator.tuning.named import NamedStrategy, strategies_on
from replicator.tuning.problem import ProblemFile, ProblemFn
from replicator.tuning.rehearsal import Rehearsal, nearest_mesh

LIMIT_S = 600.0
_PROGRAM = "replicator.tuning.rehearsal_process"
# On a busy machine devices wait for each other longer than XLA's 40 s; the process has
# a limit of its own.
_PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=100000"
# Each program runs a few times: machine code may be slow. What XLA makes of a program,
# and how it cuts it, is the same.
_FAST_COMPILER = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalOrder:
    """A step to rehearse.

    Attributes:
      problem: Place of the function that returns the problem, or the function; it takes
        `small=True`.
      make_replicator: `Replicator`; it is called with `devices` and `strategy`.
      strategy: The strategy.
      devices: Number of devices that are planned.

    Raises:
      ArgumentError: `devices` is below 1.
    """

    problem: ProblemFile | ProblemFn
    make_replicator: Callable[..., Any]
    strategy: Strategy
    devices: int

    def __post_init__(self) -> None:
        check_count("devices", self.devices, "Use 256.")


def rehearse(order: RehearsalOrder, *, limit_s: float = LIMIT_S) -> Rehearsal:
    """Make a step's first two updates at small sizes, and compare them with one device.

    That happens on faked devices, in a process of its own; at most 256 of them, with
    more on the nearest mesh of the same axes. Nothing that fails there raises here.

    Args:
      order: What to rehearse.
      limit_s: Seconds after which the process is ended.

    Raises:
      ArgumentError: The strategy does not fit so many devices, or `problem` has no
        small sizes.
    """
    began_s = time.monotonic()
    found = started_rehearsal(order)
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_FAST_COMPILER} {_PATIENT}".strip()
    answer = ask_child(_PROGRAM, order, limit_s=limit_s, XLA_FLAGS=flags)
    if not isinstance(answer, ChildEnd):
        found = Rehearsal.from_json(answer)
        if found.status == "problem":
            raise ArgumentError(found.reason)
        return found
    status = "timeout" if answer.is_late else "died"
    return dataclasses.replace(
        found,
        status=status,
        reason=answer.why,
        seconds=round(time.monotonic() - began_s, 1),
    )


def rehearse_each(
    problem: ProblemFile,
    topologies: Sequence[str],
    strategies: Sequence[NamedStrategy] | None,
    *,
    make_replicator: Callable[..., Any],
    limit_s: float = LIMIT_S,
) -> Iterable[Rehearsal]:
    """Yield a rehearsal for each topology and strategy, in the order of `plan_rows`.

    Args: as for `plan_rows`.

    Raises:
      ArgumentError: A topology does not exist, a strategy does not fit it, or the
        problem has no small sizes.
    """
    for topology in topologies:
        machine = Machine.from_topology(topology)
        for named in strategies_on(machine, strategies):
            order = RehearsalOrder(
                problem=problem,
                make_replicator=make_replicator,
                strategy=named.strategy,
                devices=machine.num_devices,
            )
            yield rehearse(order, limit_s=limit_s)


def started_rehearsal(order: RehearsalOrder) -> Rehearsal:
    """Return the rehearsal of an order before it has begun: its meshes.

    Raises:
      ArgumentError: The strategy does not fit so many devices.
    """
    strategy = order.strategy
    planned = strategy.sizes(order.devices)
    return Rehearsal(
        status="died",
        strategy=strategy.name,
        planned=planned,
        mesh=nearest_mesh(planned),
    )
