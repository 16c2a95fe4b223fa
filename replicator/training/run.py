"""Put a run together from what its user gives, and refuse what does not fit.

Nothing here is open yet but the journal: `Session` opens.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Required, TypedDict

import numpy as np

from replicator.base.types import Dataset, InitFn, PyTree
from replicator.checkpoint.retention import Retention
from replicator.checkpoint.snapshot import describe_leaves
from replicator.distributed.same_everywhere import require_same_arguments
from replicator.engine.auto_microbatch import (
    check_memory_limit,
    first_batch,
    fit_accumulate,
)
from replicator.engine.eager_calls import in_no_mesh, require_eager
from replicator.engine.evaluation.blocks import DEFAULT_BLOCK
from replicator.engine.evaluation.evaluate import EvalFn, Evaluation
from replicator.engine.first_update.check import FirstUpdateCheck
from replicator.engine.layout import Layout
from replicator.engine.make_step import compiled_step, debug_step
from replicator.engine.sharded_step import CompileOptions
from replicator.engine.step.state import FirstState, first_run, given_run
from replicator.errors import ArgumentError, check_flags, check_function, check_kind
from replicator.inputs.adapters import check_read_anew
from replicator.inputs.options import InputOptions
from replicator.monitoring.phases import Phases
from replicator.training.best_metric import Follow
from replicator.training.checkpoint_hook import hook_states
from replicator.training.hooks.hook import Hook, checked_hooks
from replicator.training.hooks.schedule import Every
from replicator.training.loop import Step
from replicator.training.loop_plan import LoopPlan
from replicator.training.node import Node
from replicator.training.nonfinite.policy import OnNonfinite
from replicator.training.nonfinite.rollback import make_recovery
from replicator.training.nonfinite.spikes import Spikes
from replicator.training.options import (
    Checkpointing,
    checkpointing_of,
    evaluating_of,
    recording_of,
)
from replicator.training.reports.first_updates import first_update_check
from replicator.training.reports.records import open_journal
from replicator.training.training import Training
from replicator.training.watchdog.limits import Limits, as_limits


class RunOptions(TypedDict, total=False):
    """What `Replicator.run` takes by keyword: it says what each is."""

    init_fn: InitFn | None
    init_state: PyTree
    steps: Required[int | None]
    seed: int
    accumulate: int
    auto_microbatch: bool
    memory_limit_bytes: int | None
    steps_per_call: int
    directory: str | os.PathLike[str] | None
    checkpoint_dir: str | os.PathLike[str] | None
    checkpoint_every: int | Every
    retention: Retention | None
    eval_fn: EvalFn | None
    eval_dataset: Dataset | Mapping[str, Dataset] | None
    eval_every: int | Every | None
    follow: Follow | None
    hooks: Sequence[Hook]
    step_timeout: float | Limits | None
    inputs: InputOptions | None
    write_every: int
    gradient_norm: bool
    display: bool
    profile: range | None
    on_nonfinite: OnNonfinite | None
    spikes: Spikes | None
    checks: frozenset | None
    check_first_updates: bool | None
    debug: bool
    node: Node | None


@in_no_mesh
def plan_run(
    given: Mapping[str, Any],
    layout: Layout,
    defaults: CompileOptions,
    evaluation_of: Callable[..., Evaluation],
) -> Training:
    """Return all that a run is made of.

    Args:
      given: By its user: every argument of `Replicator.run`, by name; `step_fn` and
        `dataset` may be None.
      layout: How replicas lie on devices.
      defaults: How a step is lifted, but for what is given.
      evaluation_of: `rep.compile_evaluation`, which makes one for each function.

    Raises:
      ArgumentError: Two arguments do not fit each other, or one is of a wrong kind.
    """
    # NumPy's integers are integers, and no JSON.
    given = {name: _of_python(value) for name, value in given.items()}
    phases = Phases()
    checkpointing = checkpointing_of(given)
    evaluating = evaluating_of(given)
    recording = recording_of(given)
    check_kind("spikes", given["spikes"], Spikes)
    options = _checked_options(given, defaults)
    plan = LoopPlan(steps=given["steps"], steps_per_call=options.steps_per_call)
    _check_left_to_run(given["inputs"], options, plan)
    limits, hooks = as_limits(given["step_timeout"]), checked_hooks(given["hooks"])
    if checkpointing is not None:
        hook_states(hooks)  # refuses one that could not be saved
    first = _first_state(given, layout)
    events = open_journal(recording.directory)
    options = _fitted(given, options, first, layout)
    reading = _reading(given["inputs"] or InputOptions(), options, steps=plan.steps)
    check = first_update_check(
        given["check_first_updates"], directory=recording.directory, events=events
    )
    return Training(
        step=_step(given, options, layout, phases, check),
        step_fn=given["step_fn"],
        options=options,
        first=first,
        first_updates=check,
        dataset=given["dataset"],
        layout=layout,
        plan=plan,
        reading=reading,
        seed=given["seed"],
        arguments=_arguments(plan, checkpointing, options, layout, reading),
        recording=recording,
        checkpointing=checkpointing,
        evaluating=evaluating,
        evaluation_of=functools.partial(evaluation_of, block=DEFAULT_BLOCK),
        events=events,
        recovery=make_recovery(
            first.shapes.user,
            on_nonfinite=given["on_nonfinite"],
            spikes=given["spikes"],
            journal=events,
        ),
        hooks=hooks,
        phases=phases,
        limits=limits.for_input(reading.timeout_s),
        node=given["node"],
    )


def _of_python(value: Any) -> Any:
    return value.item() if isinstance(value, np.integer) else value


def _checked_options(
    given: Mapping[str, Any], defaults: CompileOptions
) -> CompileOptions:
    check_flags(auto_microbatch=given["auto_microbatch"], debug=given["debug"])
    check_memory_limit(
        given["memory_limit_bytes"], auto_microbatch=given["auto_microbatch"]
    )
    check_kind("inputs", given["inputs"], InputOptions)
    _check_node(given["node"])
    if given["step_fn"] is None:
        _check_own_steps(given)
    else:
        check_function("step_fn", given["step_fn"], "state, batch", "state, batch, key")
    return dataclasses.replace(
        defaults,
        accumulate=given["accumulate"],
        steps_per_call=given["steps_per_call"],
        checks=given["checks"],
    )


def _check_node(node: object) -> None:
    if node is not None and not isinstance(node, Node):
        raise ArgumentError(
            f"`node` must be the node that the run is in, got {node!r}. Pass "
            "`lp.context.get_context()`."
        )


def _check_own_steps(given: Mapping[str, Any]) -> None:
    """Refuse what only a step that the session makes can do."""
    asked = {
        "auto_microbatch": given["auto_microbatch"],
        "debug": given["debug"],
        "steps_per_call": given["steps_per_call"] != 1,
        'on_nonfinite="skip"': given["on_nonfinite"] == "skip",
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        raise ArgumentError(
            f"`step_fn` must be given with `{name}`, got None. Leave `{name}` out, or "
            "let the session make the steps."
        )


def _first_state(given: Mapping[str, Any], layout: Layout) -> FirstState:
    require_eager("rep.run")
    init_fn, init_state = given["init_fn"], given["init_state"]
    if (init_fn is None) == (init_state is None):
        raise ArgumentError(
            "One of `init_fn` and `init_state` must be given, got "
            f"{'neither' if init_fn is None else 'both'}. Pass `init_fn`, or a "
            "state to go on from."
        )
    if init_fn is None:
        return given_run(init_state, layout, seed=given["seed"])
    check_function("init_fn", init_fn, "key")
    return first_run(init_fn, layout, seed=given["seed"])


def _step(
    given: Mapping[str, Any],
    options: CompileOptions,
    layout: Layout,
    phases: Phases,
    check: FirstUpdateCheck | None,
) -> Step | None:
    if (step_fn := given["step_fn"]) is None:
        return None
    reports_norms = given["gradient_norm"]
    if given["debug"]:
        return debug_step(step_fn, options, counted=True, reports_norms=reports_norms)
    return compiled_step(
        step_fn,
        layout,
        options,
        counted=True,
        skips_bad=given["on_nonfinite"] == "skip",
        reports_norms=reports_norms,
        phases=phases,
        check=check,
    )


def _fitted(
    given: Mapping[str, Any], options: CompileOptions, first: FirstState, layout: Layout
) -> CompileOptions:
    """Choose as few microbatches as fit, if that is asked for."""
    if not given["auto_microbatch"]:
        return options
    if options.accumulate != 1:
        raise ArgumentError(
            "`accumulate` must be left out with `auto_microbatch`, got "
            f"{options.accumulate}. Leave one of them out."
        )
    step_fn, dataset = given["step_fn"], given["dataset"]
    if step_fn is None or dataset is None:
        raise ArgumentError(
            "`dataset` must be given with `auto_microbatch`, got None. Pass it, or "
            "choose `accumulate`."
        )
    accumulate = fit_accumulate(
        step_fn,
        layout,
        options,
        make_state=first.born,
        batch=first_batch(dataset, layout, given["inputs"] or InputOptions()),
        limit_bytes=given["memory_limit_bytes"],
    )
    return dataclasses.replace(options, accumulate=accumulate)


def _arguments(
    plan: LoopPlan,
    checkpointing: Checkpointing | None,
    options: CompileOptions,
    layout: Layout,
    reading: InputOptions,
) -> dict[str, Any]:
    """Return what the records say of the run, in plain JSON."""
    names = ("accumulate", "steps_per_call", "reduction")
    return {
        "steps": plan.steps,
        "checkpoint_dir": checkpointing and os.fspath(checkpointing.directory),
        "num_replicas": layout.num_replicas,
        **{name: getattr(options, name) for name in names},
        "strategy": layout.describe() | {"reduction": options.reduction},
        "inputs": dataclasses.asdict(reading),
    }


def _check_left_to_run(
    inputs: InputOptions | None, options: CompileOptions, plan: LoopPlan
) -> None:
    of_run = {
        "accumulate": options.accumulate,
        "steps_per_call": options.steps_per_call,
        "steps": plan.steps,
    }
    for name, value in of_run.items() if inputs is not None else ():
        told = getattr(inputs, name)
        if told not in (getattr(InputOptions(), name), value):
            raise ArgumentError(
                f"`inputs` must leave `{name}` to the run, got {told}. Pass "
                f"`{name}={told}` to `run` itself."
            )


def _reading(
    inputs: InputOptions, options: CompileOptions, *, steps: int | None
) -> InputOptions:
    epochs = inputs.epochs
    if steps is None and epochs is None:
        epochs = 1  # then it is the dataset's end that ends the run
    return dataclasses.replace(
        inputs,
        accumulate=options.accumulate,
        steps_per_call=options.steps_per_call,
        epochs=epochs,
    )


def require_possible(of: Training) -> None:
    """Refuse a run that could not be saved, or go back; nothing of it is open yet.

    Raises:
      ArgumentError: It could not.
      DistributedError: It is not the same in all processes.
    """
    _require_way_back(of)
    if of.checkpointing is not None:
        describe_leaves(of.first.shapes)
    _require_same(of)


def _require_way_back(of: Training) -> None:
    if not of.recovery.policy.goes_back:
        return
    by_nonfinite = of.recovery.policy.on_nonfinite == "rollback"
    if of.checkpointing is None:
        other = 'on_nonfinite="skip"' if by_nonfinite else 'Spikes(action="log")'
        raise ArgumentError(
            "`checkpoint_dir` must be given to go back to a checkpoint, got None. "
            f"Pass it, or choose `{other}`."
        )
    if of.dataset is None or of.step is None:
        other = "on_nonfinite" if by_nonfinite else "spikes"
        raise ArgumentError(
            "`step_fn` and `dataset` must be given to go back to a checkpoint, got "
            f"None. Pass both, or leave `{other}` out."
        )
    check_read_anew(
        "dataset",
        of.dataset,
        why="on_nonfinite='rollback'",
        adapters=of.reading.adapters,
    )


def _require_same(of: Training) -> None:
    """Refuse a run that is not the same in all processes."""
    plain = (bool, int, float, str, type(None))
    words = {
        name: word for name, word in of.arguments.items() if isinstance(word, plain)
    }
    saved = of.checkpointing and str(of.checkpointing.when)
    require_same_arguments(
        of.mesh, {"seed": of.seed, "checkpoint_every": saved} | words
    )
