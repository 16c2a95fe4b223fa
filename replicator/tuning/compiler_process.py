"""The process that compiles one step: see `compiling.py`."""

import dataclasses
import importlib.metadata
import os
import re
import time
from typing import Any

import jax

from replicator.base.host.fake_devices import fake_devices
from replicator.base.out_of_memory import is_out_of_memory
from replicator.base.types import Device, PyTree
from replicator.distributed.child import received_order
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.inspection.inspection import Inspection
from replicator.engine.memory import state_bytes
from replicator.engine.program_cost import traced_work
from replicator.engine.program_key import program_key
from replicator.engine.step.state import state_shapes
from replicator.errors import ArgumentError, takes
from replicator.strategies.cost import Features, forecast
from replicator.strategies.variables import variables_of
from replicator.tuning.compiling import CompileOrder
from replicator.tuning.kept_outcomes import keep_outcome, kept_outcome
from replicator.tuning.outcome import CompileOutcome
from replicator.tuning.problem import Problem, function_of, problem_from
from replicator.tuning.topologies import devices_of, memory_limit_bytes, size_of

# Of all that a program needs, and of its temporaries alone.
_USED = re.compile(r"Used ([\d.]+[KMGT]).* hbm")
_TEMPORARIES = re.compile(r"HLO temporaries \(([\d.]+[KMGT])\) exceeds")
_LONGEST_REASON = 400
_PLATFORMS = ("cpu", "gpu")


def main() -> None:
    """Read an order from standard input; write its outcome to standard output."""
    # What a problem prints must not come between.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    order: CompileOrder = received_order()
    outcome = outcome_of(order)
    with output:
        output.write(outcome.to_json().encode())


def outcome_of(order: CompileOrder) -> CompileOutcome:
    """Trace, lower and compile in this process; it must be a fresh one."""
    began_s = time.monotonic()
    try:
        devices = _devices(order.devices)
        rep = order.make_replicator(
            devices=devices, strategy=order.strategy, compilation_cache=False
        )
    except (ArgumentError, ImportError) as failure:
        return _failed("refused", failure)
    try:
        problem = problem_from(function_of(order.problem), rep)
    except ArgumentError as failure:
        return _failed("problem", failure)
    try:
        step, lowered = _lowered(rep, problem, order)
    except Exception as failure:  # the user's functions run here
        return _failed("refused", failure)
    found = _compiled(step, lowered, problem, order) if order.compiles else lowered
    if found.seconds:  # kept
        return found
    found = dataclasses.replace(found, seconds=round(time.monotonic() - began_s, 1))
    if order.kept_in is not None:
        keep_outcome(order.kept_in, found, order.devices)
    return found


def _devices(text: str) -> list[Device]:
    platform, _, count = text.partition(":")
    if platform == "cpu":
        fake_devices(int(count))
    if platform in _PLATFORMS:
        return jax.devices(platform)[: int(count)]
    # Arrays that a problem makes lie on the host.
    jax.config.update("jax_platforms", "cpu")
    return devices_of(text)


def _lowered(
    rep: Any, problem: Problem, order: CompileOrder
) -> tuple[CompiledStep, CompileOutcome]:
    """Return the step, and what is known before it is compiled."""
    step = rep.compile(problem.step_fn, accumulate=order.accumulate)
    state = state_shapes(problem.init_fn, rep.layout, name="init_fn")
    key = _key(problem)
    traced = step.trace(state, problem.batch, key)
    described = rep.layout.describe()
    is_topology = order.devices.partition(":")[0] not in _PLATFORMS
    names = ("jax", "libtpu") if is_topology else ("jax",)
    work = traced_work(traced.jaxpr)
    return step, CompileOutcome(
        status="forecast",
        strategy=described.get("name", "data_parallel"),
        mesh=described["mesh"],
        examples=problem.examples,
        state_bytes=state_bytes(state),
        flops=sum(work.flops.values()),
        features=_forecast(rep, state, traced),
        limit_bytes=memory_limit_bytes(rep.mesh.devices.flat[0])
        if is_topology
        else None,
        key=program_key(step.lower(state, problem.batch, key)),
        versions={name: importlib.metadata.version(name) for name in names},
    )


def _forecast(rep: Any, state: PyTree, traced: jax.stages.Traced) -> Features:
    work = traced_work(traced.jaxpr)
    features = forecast(
        rep.layout.strategy,
        variables_of(state),
        rep.mesh.devices.size,
        flops=work.flops,
        memory_bytes=work.product_bytes,
    )
    if not work.replicates:
        return features
    # Its collectives are in the traced program.
    return dataclasses.replace(features, traffic=work.traffic)


def _compiled(
    step: CompiledStep, lowered: CompileOutcome, problem: Problem, order: CompileOrder
) -> CompileOutcome:
    """Compile, or find what was kept."""
    if order.kept_in is not None:
        kept = kept_outcome(order.kept_in, lowered, order.devices)
        if kept is not None:
            # Another strategy may come to the same program.
            same = {"strategy": lowered.strategy, "mesh": lowered.mesh}
            return dataclasses.replace(kept, **same)
    try:
        found = step.inspect(problem.init_fn, problem.batch, _key(problem))
    except jax.errors.JaxRuntimeError as failure:
        return dataclasses.replace(
            lowered,
            status="memory" if is_out_of_memory(failure) else "compiler",
            reason=_text(failure),
            memory_bytes=_needed(str(failure), lowered.state_bytes),
            features=None,
        )
    return dataclasses.replace(
        lowered,
        status="compiled",
        memory_bytes=_peak(found),
        features=found.features(),
    )


def _key(problem: Problem) -> Any:
    if takes(problem.step_fn, 2):
        return None
    return jax.eval_shape(lambda: jax.random.key(0))


def _peak(found: Inspection) -> int | None:
    if found.memory is None:
        return None
    # The sum of all parts counts what is not there at the same time.
    return found.memory.peak_bytes or found.memory.total_bytes


def _needed(text: str, state_bytes: int) -> int | None:
    """Return the bytes of a device that a program needs, by a TPU compiler's error.

    >>> _needed("Ran out of memory in hbm. Used 17.5G of 15.75G hbm.", 0)
    18790481920
    """
    if named := _USED.search(text):
        return size_of(named[1])
    if named := _TEMPORARIES.search(text):
        return size_of(named[1]) + state_bytes
    return None


def _failed(status: Any, failure: Exception) -> CompileOutcome:
    return CompileOutcome(status=status, reason=_text(failure))


def _text(failure: Exception) -> str:
    text = " ".join(str(failure).split())
    if not isinstance(failure, ArgumentError | ImportError):
        text = f"{type(failure).__name__}: {text}"
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "..."
