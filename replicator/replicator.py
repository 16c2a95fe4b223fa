"""One object for users: where replicas run, how a step is lifted onto them, and a loop.

It joins modules and decides nothing: `own_loops` is the first half of it, `training`
runs what `run` puts together.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

from replicator.base.host.paths import checked_path
from replicator.base.types import Dataset, InitFn, PyTree, StepFn
from replicator.checkpoint.retention import Retention
from replicator.engine.auto_microbatch import (
    check_memory_limit,
    first_batch,
    fit_accumulate,
)
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.eager_calls import require_eager
from replicator.engine.evaluation.evaluate import EvalFn
from replicator.engine.layout import Layout
from replicator.engine.make_step import compiled_step, debug_step
from replicator.engine.own_loops import OwnLoops
from replicator.engine.sharded_step import CompileOptions
from replicator.engine.step.state import FirstState, first_run, given_run
from replicator.errors import (
    ArgumentError,
    check_count,
    check_flags,
    check_function,
    check_kind,
)
from replicator.hooks import Every, Hook, checked_hooks
from replicator.inputs.adapters import check_read_anew
from replicator.inputs.options import InputOptions
from replicator.monitoring.phases import Phases
from replicator.training.best_metric import Follow
from replicator.training.checkpoint_hook import as_schedule, checkpoints_of, hook_states
from replicator.training.loop import LoopPlan, LoopResult
from replicator.training.nonfinite.policy import OnNonfinite
from replicator.training.nonfinite.rollback import make_recovery
from replicator.training.nonfinite.spikes import Spikes
from replicator.training.open_run import Evaluations, Training
from replicator.training.postmortem.recorded_program import one_replica_update
from replicator.training.reports.records import Records, check_profile, open_journal
from replicator.training.run import train
from replicator.training.watchdog.limits import Limits, as_limits


class Replicator(OwnLoops):
    """Run what one replica does on many devices.

    Args:
      num_replicas: How many devices to use; all by default.
      devices: Devices to choose from; JAX's own by default.
      reduction: `"fast"` leaves to XLA in which order gradients add up. `"ordered"`
        adds them in example order, in replicas × microbatches blocks: 8 × 1, 4 × 2 and
        2 × 4 give the same bits; another product of the two adds otherwise. One replica
        is compiled to another program: 1 × 8 has the bits of 8 × 1 for layers and
        convolutions, and for attention those of a rounding elsewhere.
      max_in_flight: Calls dispatched and not yet finished, at most; never above 16 on
        CPU.
      compilation_cache: Keep compiled programs in a private directory of this user.

    Raises:
      ArgumentError: An argument is out of range.
      DistributedError: `replicator launch` started this process as one of several, and
        it has not joined them.
    """

    def run(
        self,
        step_fn: StepFn,
        dataset: Dataset,
        *,
        init_fn: InitFn | None = None,
        init_state: PyTree = None,
        steps: int | None,
        seed: int = 0,
        accumulate: int = 1,
        auto_microbatch: bool = False,
        memory_limit_bytes: int | None = None,
        steps_per_call: int = 1,
        directory: str | os.PathLike[str] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | Every = 100,
        retention: Retention | None = None,
        eval_fn: EvalFn | None = None,
        eval_dataset: Dataset | None = None,
        eval_every: int | Every | None = None,
        follow: Follow | None = None,
        hooks: Sequence[Hook] = (),
        step_timeout: float | Limits | None = None,
        inputs: InputOptions | None = None,
        write_every: int = 10,
        gradient_norm: bool = True,
        display: bool = True,
        profile: range | None = None,
        on_nonfinite: OnNonfinite | None = None,
        spikes: Spikes | None = None,
        checks: frozenset | None = None,
        debug: bool = False,
    ) -> LoopResult:
        """Train: read ahead, dispatch ahead, report one step late.

        Args:
          step_fn: What one replica does: `step_fn(state, batch[, key])` returns the new
            state and metrics. The key is `fold_in(run's key, step)`, equal on all
            replicas and in all microbatches.
          dataset: An iterable of global batches, or `input_fn(context)`; one that can
            be iterated again is, until the steps are done.
          init_fn: `init_fn(key)` returns the first state.
          init_state: In its place: the first state, as `put` takes it; copied.
          steps: Updates to make; None runs until the dataset ends.
          seed: Of the keys of `init_fn` and `step_fn`.
          accumulate: Equal microbatches that each global batch is cut into.
          auto_microbatch: Choose the smallest `accumulate` that fits into memory:
            programs are compiled, and the first that fits is run, to find it.
          memory_limit_bytes: What it has to fit into on each device; by default what
            the devices say that they have.
          steps_per_call: Updates per dispatch, with no change of meaning.
          directory: Where `metrics.jsonl`, TensorBoard events (if installed),
            `run.json` and the journal go; None writes nothing. `replicator report`
            makes a page of it.
          checkpoint_dir: Where the whole run is saved, and from where it goes on by
            itself, bit for bit; one directory per run.
          checkpoint_every: Steps between saves, or a schedule such as
            `hooks.every(seconds=600)`.
          retention: Which checkpoints stay; the last three by default.
          eval_fn: What is evaluated, as in `evaluate`; tried on one batch before the
            first step.
          eval_dataset: On what: it is read anew each time.
          eval_every: Steps between evaluations, or a schedule; the last state is
            evaluated, too.
          follow: The number of the evaluation that tells which step is the best, and
            when to give up.
          hooks: What else happens, after the built-in reports.
          step_timeout: Seconds that a step may take before the program ends, with all
            stacks told; by default ten times the median, at least 60. `Limits` say
            it for all that a run does.
          inputs: How the dataset is read and checked; its `accumulate`,
            `steps_per_call` and `steps` are left to the run.
          write_every: Steps between written metrics.
          gradient_norm: Whether metrics tell the norm of the reduced gradient; it takes
            one more reading of the gradient, several per cent of a small model's step.
          display: Whether progress is shown on standard error.
          profile: Steps to trace, for example `range(100, 110)`; the signal SIGUSR2
            traces the next ten.
          on_nonfinite: What a metric that is NaN or infinite leads to. `"raise"` ends
            the run, and is the default unless an optimizer skips such updates;
            `"skip"` leaves the update out, on all replicas alike; `"rollback"` goes
            back to the last good checkpoint and leaves the batch out; `"ignore"` goes
            on.
          spikes: Which metric to watch for sudden leaps, and what they lead to.
          checks: As in `compile`.
          debug: As in `compile`.

        Returns:
          The final state of the user, the last metrics, steps, examples and rates.

        Raises:
          ArgumentError: An argument is of a wrong kind or out of range, or the dataset
            ended early.
          BatchError: A batch does not fit.
          NonFiniteError: A batch or a metric holds NaN or infinity.
          Preempted: A signal asked the run to stop, and it is saved.
          ReplicationError: The state may differ between replicas.
          StateError: `step_fn` returned another structure.
        """
        phases = Phases()
        check_count("write_every", write_every)
        directory = checked_path("directory", directory)
        checkpoint_dir = checked_path("checkpoint_dir", checkpoint_dir)
        check_flags(auto_microbatch=auto_microbatch, gradient_norm=gradient_norm)
        check_flags(display=display, debug=debug)
        check_memory_limit(memory_limit_bytes, auto_microbatch=auto_microbatch)
        _check_kinds(step_fn, inputs=inputs, spikes=spikes)
        options = self._options(accumulate, steps_per_call, checks)
        plan = LoopPlan(steps=steps, steps_per_call=steps_per_call)
        _check_left_to_run(inputs, options, plan)
        checkpoints = checkpoints_of(checkpoint_dir, checkpoint_every, retention)
        evaluations = self._evaluations(eval_fn, eval_dataset, eval_every, follow)
        limits, hooks = as_limits(step_timeout), checked_hooks(hooks)
        if checkpoints is not None:
            hook_states(hooks)  # refuses one that could not be saved
        check_profile(profile, directory)
        first = self._first(init_fn, init_state, seed)
        events = open_journal(directory)
        if auto_microbatch:
            batch = first_batch(dataset, self._layout, inputs or InputOptions())
            options = self._fitted(
                step_fn, options, first, batch, limit_bytes=memory_limit_bytes
            )
        recovery = make_recovery(
            first.shapes.user, on_nonfinite=on_nonfinite, spikes=spikes, journal=events
        )
        reading = _reading(inputs or InputOptions(), options, steps=plan.steps)
        training = Training(
            step=debug_step(step_fn, options, counted=True, reports_norms=gradient_norm)
            if debug
            else self._compiled(step_fn, options, on_nonfinite, gradient_norm, phases),
            first=first,
            dataset=dataset,
            layout=self._layout,
            plan=plan,
            reading=reading,
            records=Records(
                directory=directory,
                write_every=write_every,
                display=display,
                seed=seed,
                arguments={
                    "steps": plan.steps,
                    "checkpoint_dir": checkpoint_dir and os.fspath(checkpoint_dir),
                    **_plain(options, self._layout),
                    "inputs": dataclasses.asdict(reading),
                },
                profile=profile,
            ),
            checkpoints=checkpoints,
            evaluations=evaluations,
            events=events,
            recovery=recovery,
            one_replica=one_replica_update(step_fn, steps_per_call=steps_per_call),
            hooks=hooks,
            phases=phases,
            limits=limits,
        )
        return train(training)

    def _first(
        self, init_fn: InitFn | None, init_state: PyTree, seed: int
    ) -> FirstState:
        require_eager("rep.run")
        if (init_fn is None) == (init_state is None):
            raise ArgumentError(
                "One of `init_fn` and `init_state` must be given, got "
                f"{'neither' if init_fn is None else 'both'}. Pass `init_fn`, or a "
                "state to go on from."
            )
        if init_fn is None:
            return given_run(init_state, self._layout, seed=seed)
        check_function("init_fn", init_fn, "key")
        return first_run(init_fn, self._layout, seed=seed)

    def _compiled(
        self,
        step_fn: StepFn,
        options: CompileOptions,
        on_nonfinite: OnNonfinite | None,
        reports_norms: bool,
        phases: Phases,
    ) -> CompiledStep:
        return compiled_step(
            step_fn,
            self._layout,
            options,
            counted=True,
            skips_bad=on_nonfinite == "skip",
            reports_norms=reports_norms,
            phases=phases,
        )

    def _fitted(
        self,
        step_fn: StepFn,
        options: CompileOptions,
        first: FirstState,
        batch: PyTree,
        *,
        limit_bytes: int | None,
    ) -> CompileOptions:
        """Choose as few microbatches as fit."""
        if options.accumulate != 1:
            raise ArgumentError(
                "`accumulate` must be left out with `auto_microbatch`, got "
                f"{options.accumulate}. Leave one of them out."
            )
        accumulate = fit_accumulate(
            step_fn,
            self._layout,
            options,
            make_state=first.born,
            batch=batch,
            limit_bytes=limit_bytes,
        )
        return dataclasses.replace(options, accumulate=accumulate)

    def _evaluations(
        self,
        eval_fn: EvalFn | None,
        dataset: Dataset | None,
        when: int | Every | None,
        follow: Follow | None,
    ) -> Evaluations | None:
        check_kind("follow", follow, Follow)
        given = {"eval_fn": eval_fn, "eval_dataset": dataset, "eval_every": when}
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == 3 and follow is None:
            return None
        if eval_fn is None or dataset is None or when is None:
            raise ArgumentError(
                "`eval_fn`, `eval_dataset` and `eval_every` must be given together, "
                f"got no `{missing[0]}`. Pass it, or leave all out."
            )
        check_function("eval_fn", eval_fn, "state, batch")
        check_read_anew("eval_dataset", dataset)
        evaluate = functools.partial(self.evaluate, eval_fn, dataset)
        return Evaluations(
            evaluate=lambda state, inputs=None: evaluate(state=state, inputs=inputs),
            when=as_schedule("eval_every", when),
            follow=follow,
        )


def run(
    step_fn: StepFn,
    dataset: Dataset,
    *,
    steps: int | None,
    **arguments: Any,
) -> LoopResult:
    """Train on all devices: `Replicator().run(...)`, which says what it takes."""
    return Replicator().run(step_fn, dataset, steps=steps, **arguments)


def _check_kinds(
    step_fn: StepFn, *, inputs: InputOptions | None, spikes: Spikes | None
) -> None:
    check_function("step_fn", step_fn, "state, batch", "state, batch, key")
    check_kind("inputs", inputs, InputOptions)
    check_kind("spikes", spikes, Spikes)


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


def _plain(options: CompileOptions, layout: Layout) -> dict[str, Any]:
    """Return what the records say of the options, in plain JSON."""
    names = ("accumulate", "steps_per_call", "reduction")
    return {
        "num_replicas": layout.num_replicas,
        **{name: getattr(options, name) for name in names},
        "strategy": layout.describe() | {"reduction": options.reduction},
    }
