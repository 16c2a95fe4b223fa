"""A checked run: `make_run_spec` makes it from options, `Session` opens it."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from replicator.base.mesh import spans_processes
from replicator.base.types import Dataset, StepFn
from replicator.engine.auto_microbatch import (
    check_memory_limit,
    first_batch,
    fit_accumulate,
)
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.evaluation.blocks import DEFAULT_BLOCK
from replicator.engine.evaluation.evaluate import EvalFn, Evaluation
from replicator.engine.first_update.check import FirstUpdateCheck
from replicator.engine.layout import Layout
from replicator.engine.make_step import compiled_step, debug_step
from replicator.engine.require_eager import in_no_mesh, require_eager
from replicator.engine.sharded_step import CompileOptions
from replicator.engine.step.state import FirstState, first_run, given_run
from replicator.errors import ArgumentError, check_flags, check_function, check_kind
from replicator.hooks.hook_states import hook_states
from replicator.hooks.protocol import Hook, checked_hooks
from replicator.hooks.schedule import Every
from replicator.inputs.adapters import ending
from replicator.inputs.options import InputOptions
from replicator.monitoring.events import EventLog
from replicator.monitoring.phases import Phases
from replicator.training.loop import Step
from replicator.training.node import ProgramNode
from replicator.training.nonfinite.rollback import Recovery, make_recovery
from replicator.training.nonfinite.spikes import Spikes
from replicator.training.options import (
    Checkpointing,
    Evaluating,
    LoopPlan,
    RunOptions,
    check_left_to_run,
    checkpointing_of,
    evaluating_of,
    replica_checks_of,
)
from replicator.training.reports.first_updates import first_update_check
from replicator.training.reports.journal import open_journal
from replicator.training.reports.recording import Recording, recording_of
from replicator.training.watchdog.limits import Limits, as_limits
from replicator.tuning.choosing.decision import Decision
from replicator.tuning.choosing.runs import decided_layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """All settings and parts of a run, checked and not open yet.

    Attributes:
      step: Compiled step on a `RunState`; None if the loop has steps of its own.
      step_fn: The user's step of one replica; None likewise.
      options: Options of lifting a step.
      first: First state, for a run without a checkpoint.
      first_updates: Check of the first updates of its steps; None for no check.
      dataset: Training data; None if the loop has batches of its own.
      layout: Layout of state and batches on devices.
      plan: Number of steps, and of steps per call.
      reading: Options of reading the dataset.
      seed: Seed of the run's keys.
      arguments: Options that records and checkpoints hold, in plain JSON.
      recording: Options of metrics and records.
      checkpointing: Options of checkpoints; None saves nothing.
      evaluating: Options of evaluation; None for none.
      evaluation_of: Returns the evaluation for an `eval_fn`, compiled once.
      events: This process's journal of the run; None for none.
      recovery: Recovery from bad numbers.
      replica_checks: Schedule of comparing copies of the state; None for none.
      hooks: The user's hooks.
      phases: Phases of the run, with the time spent in each.
      limits: Longest time of each phase.
      node: Node of a program that the run is in; None for none.
    """

    step: Step | None
    step_fn: StepFn | None
    options: CompileOptions
    first: FirstState
    first_updates: FirstUpdateCheck | None
    dataset: Dataset | None
    layout: Layout
    plan: LoopPlan
    reading: InputOptions
    seed: int
    arguments: Mapping[str, Any]
    recording: Recording
    checkpointing: Checkpointing | None
    evaluating: Evaluating | None
    evaluation_of: Callable[[EvalFn], Evaluation]
    events: EventLog | None
    recovery: Recovery
    replica_checks: Every | None
    hooks: Sequence[Hook]
    phases: Phases
    limits: Limits
    node: ProgramNode | None

    @property
    def mesh(self) -> Mesh:
        """The devices of the run."""
        return self.layout.mesh

    @property
    def together(self) -> bool:
        """True if several processes make this run."""
        return spans_processes(self.mesh)

    def own_step(self, step_fn: StepFn) -> CompiledStep:
        """Return a step of the loop's own, compiled like the run's."""
        return compiled_step(
            step_fn,
            self.layout,
            self.options,
            counted=False,
            phases=self.phases,
            check=self.first_updates,
        )

    def log(self, kind: str, /, **fields: Any) -> None:
        """Write an event into the journal, if there is one."""
        if self.events is not None:
            self.events.write(kind, **fields)

    def log_once(self, kind: str, /, **fields: Any) -> None:
        """Write an event of all processes into the journal of the first one."""
        if not self.together or jax.process_index() == 0:
            self.log(kind, **fields)


@in_no_mesh
def make_run_spec(
    step_fn: StepFn | None,
    dataset: Dataset | None,
    options: RunOptions,
    decision: Decision,
    defaults: CompileOptions,
    evaluation_of: Callable[..., Evaluation],
) -> RunSpec:
    """Check the options of a run, and return the run that they describe.

    Nothing is opened but the journal.

    Args:
      step_fn: Step of one replica; None if the loop has steps of its own.
      dataset: Training data; None if the loop has batches of its own.
      options: All other options of the user.
      decision: Layout of state and batches on devices; decided here if it is not yet.
      defaults: Options of lifting a step that the run does not set.
      evaluation_of: `rep.compile_evaluation`, cached by function.

    Raises:
      ArgumentError: Two arguments contradict each other, or one is of a wrong kind.
    """
    asked = _checked(step_fn, dataset, options, decision)
    dataset, checkpointing = asked["dataset"], asked["checkpointing"]
    lifting = dataclasses.replace(
        defaults,
        accumulate=options.accumulate,
        steps_per_call=options.steps_per_call,
        checks=options.checks,
        state_copies=0 if checkpointing is None else checkpointing.device_copies,
    )
    layout = decided_layout(decision, step_fn, dataset, options, lifting)
    first, phases = _first_state(options, layout), Phases()
    directory = asked["recording"].directory
    events = open_journal(directory)
    lifting = _fitted(step_fn, dataset, options, lifting, first, layout)
    reading = _reading(options, lifting)
    check = first_update_check(
        options.check_first_updates, directory=directory, events=events
    )
    arguments = _arguments(asked["plan"], checkpointing, lifting, layout, reading)
    if decision.record is not None:
        arguments["choice"] = decision.record
    return RunSpec(
        **asked,
        step=_step(step_fn, options, lifting, layout, phases, check),
        step_fn=step_fn,
        options=lifting,
        first=first,
        first_updates=check,
        layout=layout,
        reading=reading,
        arguments=arguments,
        evaluation_of=functools.partial(evaluation_of, block=DEFAULT_BLOCK),
        events=events,
        recovery=_recovery(options, first.shapes.user, events),
        phases=phases,
        limits=as_limits(options.step_timeout).for_input(reading.timeout_s),
    )


def _checked(
    step_fn: StepFn | None,
    dataset: Dataset | None,
    options: RunOptions,
    decision: Decision,
) -> dict[str, Any]:
    """Check all options; return the fields of a `RunSpec` that follow from them."""
    checkpointing = checkpointing_of(options)
    evaluating, recording = evaluating_of(options), recording_of(options)
    replica_checks = replica_checks_of(options)
    _check_kinds(step_fn, options, decision)
    plan = LoopPlan(steps=options.steps, steps_per_call=options.steps_per_call)
    check_left_to_run(options)
    if options.steps is None and dataset is not None:
        adapters = () if options.inputs is None else options.inputs.adapters
        dataset = ending("dataset", dataset, adapters=adapters)
    as_limits(options.step_timeout)
    hooks = checked_hooks(options.hooks)
    if checkpointing is not None:
        hook_states(hooks)  # refuses one that could not be saved
    _check_first_state(options)
    return {
        "dataset": dataset,
        "plan": plan,
        "seed": options.seed,
        "recording": recording,
        "checkpointing": checkpointing,
        "evaluating": evaluating,
        "replica_checks": replica_checks,
        "hooks": hooks,
        "node": options.node,
    }


def _recovery(options: RunOptions, state: Any, log: EventLog | None) -> Recovery:
    return make_recovery(
        state,
        on_nonfinite=options.on_nonfinite,
        spikes=options.spikes,
        on_mismatch=options.on_mismatch,
        journal=log,
    )


def _check_kinds(
    step_fn: StepFn | None, options: RunOptions, decision: Decision
) -> None:
    check_kind("spikes", options.spikes, Spikes)
    check_flags(auto_microbatch=options.auto_microbatch, debug=options.debug)
    if decision.is_made:
        check_memory_limit(
            options.memory_limit_bytes, auto_microbatch=options.auto_microbatch
        )
    check_kind("inputs", options.inputs, InputOptions)
    if options.node is not None and not isinstance(options.node, ProgramNode):
        raise ArgumentError(
            f"`node` must be the node that the run is in, got {options.node!r}. Pass "
            "`lp.context.get_context()`."
        )
    if step_fn is None:
        _check_own_steps(options)
    else:
        check_function("step_fn", step_fn, "state, batch", "state, batch, key")


def _check_own_steps(options: RunOptions) -> None:
    """Refuse options that need a `step_fn`."""
    asked = {
        "auto_microbatch": options.auto_microbatch,
        "debug": options.debug,
        "steps_per_call": options.steps_per_call != 1,
        'on_nonfinite="skip"': options.on_nonfinite == "skip",
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        raise ArgumentError(
            f"`step_fn` must be given with `{name}`, got None. Leave `{name}` out, or "
            "let the session make the steps."
        )


def _check_first_state(options: RunOptions) -> None:
    require_eager("rep.run")
    init_fn, init_state = options.init_fn, options.init_state
    if init_fn is None and init_state is None:
        raise ArgumentError(
            "`init_fn` must be given, or `init_state`, got neither. Pass the function "
            "that returns the first state, which `step_fn` gets and returns:\n"
            "    def init_fn(key):\n"
            '        return {"params": init_params(key), "opt": optimizer.init(...)}'
        )
    if init_fn is not None and init_state is not None:
        raise ArgumentError(
            "One of `init_fn` and `init_state` must be given, got both. Pass "
            "`init_fn`, or a state to go on from."
        )
    if init_fn is not None:
        check_function("init_fn", init_fn, "key")


def _first_state(options: RunOptions, layout: Layout) -> FirstState:
    if options.init_fn is None:
        return given_run(options.init_state, layout, seed=options.seed)
    return first_run(options.init_fn, layout, seed=options.seed)


def _step(
    step_fn: StepFn | None,
    options: RunOptions,
    lifting: CompileOptions,
    layout: Layout,
    phases: Phases,
    check: FirstUpdateCheck | None,
) -> Step | None:
    if step_fn is None:
        return None
    reports_norms = options.gradient_norm
    if options.debug:
        return debug_step(step_fn, lifting, counted=True, reports_norms=reports_norms)
    return compiled_step(
        step_fn,
        layout,
        lifting,
        counted=True,
        skips_bad=options.on_nonfinite == "skip",
        reports_norms=reports_norms,
        phases=phases,
        check=check,
    )


def _fitted(
    step_fn: StepFn | None,
    dataset: Dataset | None,
    options: RunOptions,
    lifting: CompileOptions,
    first: FirstState,
    layout: Layout,
) -> CompileOptions:
    """Choose the smallest number of microbatches that fits, with `auto_microbatch`."""
    if not options.auto_microbatch:
        return lifting
    if options.accumulate != 1:
        raise ArgumentError(
            "`accumulate` must be left out with `auto_microbatch`, got "
            f"{options.accumulate}. Leave one of them out."
        )
    if step_fn is None or dataset is None:
        raise ArgumentError(
            "`dataset` must be given with `auto_microbatch`, got None. Pass it, or "
            "choose `accumulate`."
        )
    accumulate = fit_accumulate(
        step_fn,
        layout,
        lifting,
        make_state=first.born,
        batch=first_batch(dataset, layout, options.inputs or InputOptions()),
        limit_bytes=options.memory_limit_bytes,
    )
    return dataclasses.replace(lifting, accumulate=accumulate)


def _arguments(
    plan: LoopPlan,
    checkpointing: Checkpointing | None,
    lifting: CompileOptions,
    layout: Layout,
    reading: InputOptions,
) -> dict[str, Any]:
    """Return the options that records hold, as plain JSON."""
    return {
        "steps": plan.steps,
        "checkpoint_dir": checkpointing and os.fspath(checkpointing.directory),
        "checkpoint_copy": checkpointing and checkpointing.copy,
        "num_replicas": layout.num_replicas,
        "accumulate": lifting.accumulate,
        "steps_per_call": lifting.steps_per_call,
        "reduction": lifting.reduction,
        "strategy": layout.describe() | {"reduction": lifting.reduction},
        "inputs": dataclasses.asdict(reading),
    }


def _reading(options: RunOptions, lifting: CompileOptions) -> InputOptions:
    inputs = options.inputs or InputOptions()
    epochs = inputs.epochs
    if options.steps is None and epochs is None:
        epochs = 1  # the dataset's end ends the run
    return dataclasses.replace(
        inputs,
        accumulate=lifting.accumulate,
        steps_per_call=lifting.steps_per_call,
        epochs=epochs,
    )
