"""The process that rehearses one step: see `rehearse.py`."""

import contextlib
import dataclasses
import functools
import math
import os
import time
from typing import Any

import jax

from replicator.base.host.fake_devices import fake_devices
from replicator.distributed.child import received_order
from replicator.engine.first_update.check import (
    CheckedUpdate,
    FirstUpdateCheck,
    FirstUpdates,
)
from replicator.engine.sharded_step import CompileOptions
from replicator.engine.step.transforms import lift, takes_key
from replicator.errors import ArgumentError, PartitionError, ReplicatorError
from replicator.strategies.variables import Variable, variables_of
from replicator.tuning.problem import (
    Problem,
    at_small_sizes,
    function_of,
    problem_from,
    random_batch,
)
from replicator.tuning.rehearsal import Rehearsal, Status, on_mesh, rehearsed_cut
from replicator.tuning.rehearse import RehearsalOrder, started_rehearsal

_LONGEST_REASON = 400
_ONE = "the program"  # there is one


def main() -> None:
    """Read an order from standard input; write its result to standard output."""
    # What a problem prints must not come between.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    order: RehearsalOrder = received_order()
    began_s = time.monotonic()
    found = dataclasses.replace(
        rehearsed(order), seconds=round(time.monotonic() - began_s, 1)
    )
    with output:
        output.write(found.to_json().encode())


def rehearsed(order: RehearsalOrder) -> Rehearsal:
    """Make the first updates of a step on faked devices, and compare them.

    Args:
      order: What to rehearse; JAX must not have started.
    """
    found = started_rehearsal(order)
    count = math.prod(found.mesh.values())
    fake_devices(count)
    make = functools.partial(order.make_replicator, devices=jax.devices())
    strategy = on_mesh(order.strategy, found.mesh)
    try:
        rep = make(strategy=strategy)
    except ArgumentError as refusal:
        return _failed(found, "refused", refusal)
    try:
        function = function_of(order.problem)
        shrunk = at_small_sizes(function)
        problems = [problem_from(each, rep) for each in (function, shrunk)]
    except ArgumentError as refusal:
        return _failed(found, "problem", refusal)
    try:
        true, small = map(_variables, problems)
        cut = rehearsed_cut(strategy, dict(found.planned), true, small)
        found = dataclasses.replace(found, cut=cut.cut, left_whole=cut.left_whole)
        rep = make(strategy=cut.strategy)
        checked = _checked(rep, problem_from(shrunk, rep))
    except Exception as failure:  # the user's functions run here
        return _failed(found, "refused", failure)
    return _judged(found, checked)


def _variables(problem: Problem) -> tuple[Variable, ...]:
    return variables_of(jax.eval_shape(problem.init_fn, jax.random.key(0)))


def _checked(rep: Any, problem: Problem) -> list[CheckedUpdate]:
    """Make the first updates; return what the check of each says.

    `rep.compile(check_first_updates=True)` does it where a strategy partitions; here
    replicas are checked, too.
    """
    step_fn = problem.step_fn
    check = FirstUpdates(
        lift(step_fn),
        rep.layout,
        CompileOptions(),
        FirstUpdateCheck(),
        once=None,
        now_s=time.monotonic,
    )
    step, state = rep.compile(step_fn), rep.init(problem.init_fn)
    number = 0
    with contextlib.suppress(PartitionError):  # the check has it
        while not check.is_done(_ONE):
            batch = random_batch(problem.batch, seed=number)
            key = jax.random.key(number) if takes_key(step_fn) else None
            if (given := check.hold(_ONE, state, batch, key)) is not None:
                state, metrics = step(state, batch, key)
                check.compare(_ONE, given, state, metrics)
            number += 1
    return check.found


def _failed(found: Rehearsal, status: Status, failure: Exception) -> Rehearsal:
    # What these say is for a user; of another the kind helps, too.
    kind = "" if isinstance(failure, ReplicatorError) else f"{type(failure).__name__}: "
    reason = f"{kind}{failure}"[:_LONGEST_REASON]
    return dataclasses.replace(found, status=status, reason=reason)


def _judged(found: Rehearsal, checked: list[CheckedUpdate]) -> Rehearsal:
    last = checked[-1]
    if last.result in ("differs", "not checked"):
        status = "differs" if last.result == "differs" else "unchecked"
        return dataclasses.replace(found, status=status, reason=last.why)
    reason = "; ".join(
        f"update {number}: {each.why}" for number, each in enumerate(checked, 1)
    )
    return dataclasses.replace(found, status="ok", reason=reason)
