"""Options of a run, and the groups of them that travel together.

`Replicator.run` and `session` take each option by keyword and make one `RunOptions`.
Two groups are taken from it here, checkpoints and evaluation; that of records is in
`reports/recording.py`, that of bad numbers in `nonfinite/policy.py`. Options that
contradict each other are refused when their group is made.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from replicator.base.types import Dataset, InitFn, PyTree
from replicator.checkpoint.copies.copies import require_keeper
from replicator.checkpoint.directories.named import checked_directory
from replicator.checkpoint.pieces.copy_place import COPY_PLACES, CopyPlace
from replicator.checkpoint.retention import Retention
from replicator.engine.evaluation.evaluate import EvalFn, Evaluation
from replicator.errors import (
    ArgumentError,
    check_function,
    check_kind,
    check_word,
)
from replicator.hooks.protocol import Hook
from replicator.hooks.schedule import Every, as_schedule
from replicator.inputs.adapters import check_datasets
from replicator.inputs.options import InputOptions
from replicator.training.best_metric import Follow
from replicator.training.node import ProgramNode
from replicator.training.nonfinite.policy import OnMismatch, OnNonfinite
from replicator.training.nonfinite.spikes import Spikes
from replicator.training.watchdog.limits import Limits


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunOptions:
    """Options of a run: the keywords of `Replicator.run` and `session`.

    NumPy integers become Python's, which JSON can hold.

    Attributes:
      steps: Updates to make; None makes one pass over the dataset, or as many as
        `inputs.epochs`; a generator that goes on is a run that goes on.
      init_fn: `init_fn(key)` returns the first state.
      init_state: First state, as `put` takes it, instead of an `init_fn`; copied.
      seed: Seed of the keys of `init_fn` and `step_fn`.
      accumulate: Number of equal microbatches that each global batch is cut into.
      auto_microbatch: Whether to choose the smallest `accumulate` that fits into
        memory: programs are compiled, and the first that fits is run, to find it.
      memory_limit_bytes: Bytes of each device that it has to fit into; by default
        those that the devices report.
      steps_per_call: Updates per dispatch; results do not depend on it.
      inputs: Options of reading and checking the dataset; its `accumulate`,
        `steps_per_call` and `steps` are left to the run.
      checks: As in `Replicator.compile`.
      check_first_updates: As in `Replicator.compile`, and on by default, unless
        `REPLICATOR_CHECK_FIRST_UPDATES=0` is in the environment.
      debug: As in `Replicator.compile`.
      hooks: Your hooks, called after the built-in reports.
      step_timeout: Seconds that a step may take before the program ends with a dump of
        all stacks; by default ten times the median, at least 60. `Limits` set one for
        each phase of a run.
      node: `lp.context.get_context()` in a node of a program: the run stops, saved,
        when the program stops, and a run that hangs fails its node.
      checkpoint_dir: Checkpoints: directory where the whole run is saved, and where it
        resumes from without being asked, bit for bit; one directory per run. In a
        bucket: "gs://bucket/path" or "s3://bucket/path".
      checkpoint_every: Steps between saves, or a schedule such as
        `options.every(seconds=600)`.
      retention: Rule for checkpoints to keep; the last three by default.
      checkpoint_copy: Place where a save copies the state to before the next step: each
        `"device"`, which waits for nothing, or leaf by leaf the `"host"`, which waits
        for the step, where the devices have no room for a copy.
      memory_copy_every: Steps between copies of the whole run in the memory of
        `replicator launch`, or a schedule: after a death of processes the run goes on
        from there. A step that is copied shows its metrics at once. None makes none.
      eval_fn: Evaluation: a function as in `Replicator.evaluate`; tried on one batch
        before the first step.
      eval_dataset: Dataset to evaluate on, read anew each time; several by name,
        `{"val": ...}`.
      eval_every: Steps between evaluations, or a schedule; the last state is evaluated,
        too.
      follow: Number of the evaluation that ranks the steps, and when to give up.
      directory: Records: directory of `metrics.jsonl`, TensorBoard events (if
        installed), `run.json` and the journal; None writes nothing. In a bucket,
        "gs://bucket/path" or "s3://bucket/path": written to a folder of this host, and
        uploaded. `replicator report` makes a page of it.
      write_every: Steps between written metrics.
      gradient_norm: Whether metrics hold the norm of the reduced gradient; it takes one
        more reading of the gradient, several per cent of a small model's step.
      display: Whether progress is shown on standard error.
      profile: Steps to trace, for example `range(100, 110)`; the signal SIGUSR2 traces
        the next ten.
      on_nonfinite: Bad numbers: action on a metric that is NaN or infinite. `"raise"`
        ends the run, and is the default unless an optimizer skips such
        updates; `"skip"` leaves the update out, on all replicas alike; `"rollback"`
        goes back to the last good checkpoint and leaves the batch out; `"ignore"` goes
        on.
      spikes: Metric to watch for sudden leaps, and the action on one.
      check_replicas_every: Flipped bits: steps, or a schedule, between comparisons of
        the copies that devices hold of each leaf; also made before each save, at the
        end and behind each restore. None compares nothing.
      on_mismatch: Action on copies that differ: `"raise"` ends the run, `"rollback"`
        goes back to the last checkpoint.
    """

    steps: int | None = None
    init_fn: InitFn | None = None
    init_state: PyTree = None
    seed: int = 0
    accumulate: int = 1
    auto_microbatch: bool = False
    memory_limit_bytes: int | None = None
    steps_per_call: int = 1
    inputs: InputOptions | None = None
    checks: frozenset | None = None
    check_first_updates: bool | None = None
    debug: bool = False
    hooks: Sequence[Hook] = ()
    step_timeout: float | Limits | None = None
    node: ProgramNode | None = None

    checkpoint_dir: str | os.PathLike[str] | None = None
    checkpoint_every: int | Every = 100
    retention: Retention | None = None
    checkpoint_copy: CopyPlace = "device"
    memory_copy_every: int | Every | None = None

    eval_fn: EvalFn | None = None
    eval_dataset: Dataset | Mapping[str, Dataset] | None = None
    eval_every: int | Every | None = None
    follow: Follow | None = None

    directory: str | os.PathLike[str] | None = None
    write_every: int = 10
    gradient_norm: bool = True
    display: bool = True
    profile: range | None = None

    on_nonfinite: OnNonfinite | None = None
    spikes: Spikes | None = None
    check_replicas_every: int | Every | None = None
    on_mismatch: OnMismatch = "raise"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.integer):
                object.__setattr__(self, name, value.item())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoopPlan:
    """Number of steps of a run, and of steps per call.

    >>> LoopPlan(steps=10, steps_per_call=4)
    Traceback (most recent call last):
    replicator.errors.ArgumentError: `steps` must be a multiple of `steps_per_call`, ...

    Attributes:
      steps: Updates in all, those before `start_step` included; None runs until the
        input ends.
      start_step: Updates made before.
      steps_per_call: Updates that one call of the step makes. Above 1, each metric has
        a leading axis of that size.

    Raises:
      ArgumentError: A number is out of range, or calls do not fit into `steps`.
    """

    steps: int | None
    start_step: int = 0
    steps_per_call: int = 1

    def __post_init__(self) -> None:
        whole = isinstance(self.steps, int) and not isinstance(self.steps, bool)
        if self.steps is not None and not whole:
            raise ArgumentError(
                f"`steps` must be a whole number, got {self.steps!r}. "
                "Pass an `int`, or `steps=None` to run until the input ends."
            )
        if self.steps is not None and self.steps < 0:
            raise ArgumentError(
                f"`steps` must be at least 0, got {self.steps}. "
                "Pass `steps=None` to run until the input ends."
            )
        self._require_whole_calls()

    def _require_whole_calls(self) -> None:
        # A last call of fewer steps would compile another program at the very end.
        n, left = self.steps_per_call, (self.steps or 0) - self.start_step
        if self.steps is None or left <= 0 or left % n == 0:
            return
        lower, upper = self.steps - left % n, self.steps - left % n + n
        remedy = f"{lower} or {upper}" if lower > self.start_step else f"{upper}"
        after = f" from step {self.start_step} on" if self.start_step else ""
        raise ArgumentError(
            f"`steps` must be a multiple of `steps_per_call`{after}, "
            f"got {self.steps} for {n}. Use {remedy}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Options of a run's checkpoints.

    Attributes:
      directory: Directory of the checkpoints of this run and of no other, or its URL.
      when: Schedule of saves; the last step is saved, too.
      retention: Rule for checkpoints to keep.
      copy: Place of the copy that a save makes of the state.
      copies: Schedule of copies in the memory of launchers; None for none.
    """

    directory: Path | str
    when: Every
    retention: Retention
    copy: CopyPlace = "device"
    copies: Every | None = None

    @property
    def device_copies(self) -> int:
        """Most copies of the state that lie on devices beside it."""
        if self.copy != "device":
            return 0
        # A copy for launchers may be on its way while another is saved.
        return 1 if self.copies is None else 2


def checkpointing_of(options: RunOptions) -> Checkpointing | None:
    """Return the options of a run's checkpoints; None if it is not saved.

    >>> checkpointing_of(RunOptions(steps=3)) is None
    True
    >>> checkpointing_of(RunOptions(steps=3, checkpoint_dir="runs/a")).retention
    Retention(keep_last=3, ...)

    Raises:
      ArgumentError: An option is of a wrong kind, or given without a directory.
    """
    directory, copied = options.checkpoint_dir, options.memory_copy_every
    retention = options.retention
    check_kind("retention", retention, Retention)
    check_word("checkpoint_copy", options.checkpoint_copy, COPY_PLACES)
    given = {"retention": retention, "memory_copy_every": copied}
    if directory is None:
        for name in (name for name, value in given.items() if value is not None):
            raise ArgumentError(
                f"`checkpoint_dir` must be given with `{name}`, got None. Pass it, or "
                f"leave `{name}` out."
            )
        return None
    if copied is not None:
        require_keeper()
    return Checkpointing(
        when=as_schedule("checkpoint_every", options.checkpoint_every),
        directory=checked_directory("checkpoint_dir", directory),
        retention=retention or Retention(),
        copy=options.checkpoint_copy,
        copies=None if copied is None else as_schedule("memory_copy_every", copied),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluating:
    """Options of a run's evaluation.

    Attributes:
      eval_fn: Function as in `rep.evaluate`.
      dataset: Dataset, read anew each time; several by their names.
      when: Schedule of evaluations; the last state is evaluated, too.
      follow: Number that ranks the steps, and when to give up.
    """

    eval_fn: EvalFn
    dataset: Dataset | Mapping[str, Dataset]
    when: Every
    follow: Follow | None

    def evaluate(
        self,
        evaluation_of: Callable[[EvalFn], Evaluation],
        state: PyTree,
        *,
        inputs: InputOptions | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> Mapping[str, PyTree]:
        """Return the metrics of the dataset, or of each dataset under its name.

        Args:
          evaluation_of: Returns the evaluation for an `eval_fn`.
          state: The user's state.
          inputs: Options of reading the dataset.
          between: Called between blocks of examples; may raise to leave.
        """
        evaluation = evaluation_of(self.eval_fn)

        def metrics_of(dataset: Dataset) -> dict[str, PyTree]:
            return evaluation(state, dataset, inputs=inputs, between=between)

        if not isinstance(self.dataset, Mapping):
            return metrics_of(self.dataset)
        # Sorted: the order of the dict may differ between processes.
        return {name: metrics_of(self.dataset[name]) for name in sorted(self.dataset)}


def evaluating_of(options: RunOptions) -> Evaluating | None:
    """Return the options of a run's evaluation; None for none.

    >>> evaluating_of(RunOptions(steps=3)) is None
    True

    Raises:
      ArgumentError: Some are given without the others, or one is of a wrong kind.
    """
    follow = options.follow
    check_kind("follow", follow, Follow)
    eval_fn, dataset, when = options.eval_fn, options.eval_dataset, options.eval_every
    if eval_fn is None and dataset is None and when is None and follow is None:
        return None
    if eval_fn is None or dataset is None or when is None:
        together = {"eval_fn": eval_fn, "eval_dataset": dataset, "eval_every": when}
        missing = next(name for name, option in together.items() if option is None)
        raise ArgumentError(
            "`eval_fn`, `eval_dataset` and `eval_every` must be given together, "
            f"got no `{missing}`. Pass it, or leave all out."
        )
    check_function("eval_fn", eval_fn, "state, batch")
    check_datasets("eval_dataset", dataset)
    return Evaluating(
        eval_fn=eval_fn,
        dataset=dataset,
        when=as_schedule("eval_every", when),
        follow=follow,
    )


def replica_checks_of(options: RunOptions) -> Every | None:
    """Return the schedule on which copies of the state are compared; None for none.

    Raises:
      ArgumentError: It is not a schedule, or missing where a mismatch is to lead back.
    """
    if options.check_replicas_every is not None:
        return as_schedule("check_replicas_every", options.check_replicas_every)
    if options.on_mismatch == "rollback":
        raise ArgumentError(
            '`check_replicas_every` must be given with `on_mismatch="rollback"`, got '
            "None. Pass it, or leave `on_mismatch` out."
        )
    return None


def check_left_to_run(options: RunOptions) -> None:
    """Refuse `inputs` whose options contradict those of the run.

    Raises:
      ArgumentError: One does.

    >>> check_left_to_run(RunOptions(accumulate=2, inputs=InputOptions(accumulate=2)))
    """
    if (inputs := options.inputs) is None:
        return
    default = InputOptions()
    for name, of_input, unset, of_run in (
        ("accumulate", inputs.accumulate, default.accumulate, options.accumulate),
        (
            "steps_per_call",
            inputs.steps_per_call,
            default.steps_per_call,
            options.steps_per_call,
        ),
        ("steps", inputs.steps, default.steps, options.steps),
    ):
        if of_input not in (unset, of_run):
            raise ArgumentError(
                f"`inputs` must leave `{name}` to the run, got {of_input}. Pass "
                f"`{name}={of_input}` to `run` itself."
            )
