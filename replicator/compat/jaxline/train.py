"""Train a jaxline experiment with our loop: saved, watched, written, resumed.

The keys of steps are jaxline's, bit for bit. What a step does is the experiment's
affair, its input too: a run that goes on has the state that was saved, and its input
from the start, unless the position is among the attributes that are saved.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np

from replicator.base.host.paths import checked_path
from replicator.base.types import Key, PyTree
from replicator.checkpoint.retention import Retention
from replicator.checkpoint.store import CheckpointStore
from replicator.compat.jaxline.base_config import field, require_obeyed, schedule
from replicator.compat.jaxline.experiment import AbstractExperiment
from replicator.compat.jaxline.keys import next_keys, require_equal_rows
from replicator.compat.jaxline.saving import Progress, Saves
from replicator.compat.jaxline.writer import ScalarWriter, WithoutExamples
from replicator.errors import ArgumentError
from replicator.hooks import Hook, Report, WriteMetrics, every
from replicator.monitoring.display import make_display
from replicator.monitoring.phases import Phases
from replicator.monitoring.run_record import set_aside, write_run_record
from replicator.monitoring.writers.directory import directory_writer
from replicator.monitoring.writers.jsonl import drop_after
from replicator.monitoring.writers.multi import call_all
from replicator.training.guards import guarded
from replicator.training.loop import LoopPlan, LoopResult, run_loop
from replicator.training.preemption.agreed_time import AgreedTime
from replicator.training.preemption.hook import LeaveSaved, Preemption
from replicator.training.watchdog import Limits

_NOT_CALLED = ("train_loop", "snapshot_state", "restore_from_snapshot")

CHECKPOINTS = "checkpoints"
"""Where in an experiment's directory what is saved goes; beside it are the modes."""


def train(
    experiment_class: Callable[..., AbstractExperiment],
    config: Any,
    *,
    directory: str | os.PathLike[str] | None = None,
    hooks: Sequence[Hook] = (),
    limits: Limits | None = None,
    display: bool = True,
) -> LoopResult:
    """Train an experiment until its steps are done, from wherever it was saved.

    Args:
      experiment_class: A subclass of `AbstractExperiment`.
      config: Has the fields of `base_config.get_base_config()`, or some of them.
      directory: Of the experiment: checkpoints go into `checkpoints/`, metrics into
        `train/`. By default `config.checkpoint_dir`; without either nothing is written
        or saved.
      hooks: What else happens; the state that they see is the experiment.
      limits: How long a step may take, and what else the watchdog watches. A wait for
        input is part of the step here.
      display: Whether progress is shown on standard error.

    Returns:
      What is left; its `state` is the experiment.

    Raises:
      ArgumentError: A field of the config breaks its rule.
      CheckpointMismatchError: What was saved is another experiment's.
      Preempted: A signal asked the run to stop, and it is saved.
    """
    require_obeyed(config)
    root = find_directory(config, directory)
    own = None if root is None else root / "train"
    phases = Phases()
    together = jax.process_count() > 1
    with (
        guarded(
            phases,
            limits=limits,
            directory=own,
            together=together,
            saved=root is not None,
        ) as preemption,
        ExitStack() as opened,
    ):
        run = _Run(experiment_class, config)
        saving: list[Hook] = []
        if root is not None:
            saving = run.open_checkpoints(root / CHECKPOINTS, phases, preemption)
        opened.callback(call_all, [hook.close for hook in saving])
        reports = _open_records(config, own, run.progress, display)
        opened.callback(call_all, [hook.close for hook in reports])
        run.progress.reports = reports
        return run_loop(
            run.step,
            run.progress.experiment,
            _Turns(run),
            plan=LoopPlan(
                steps=run.steps, start_step=run.progress.step, on_nonfinite="ignore"
            ),
            hooks=[*reports, *hooks, *saving],
            phases=phases,
            in_flight=run.progress.in_flight,
            agreed_time=AgreedTime() if together else None,
        )


def find_directory(
    config: Any, directory: str | os.PathLike[str] | None
) -> Path | None:
    """Return the directory of an experiment, or None if it has none."""
    found = field(config, "checkpoint_dir") if directory is None else directory
    return checked_path("directory", found)


def make_experiment(
    experiment_class: Callable[..., AbstractExperiment],
    mode: str,
    rng: Key,
    config: Any,
) -> AbstractExperiment:
    """Make an experiment; old ones take no `init_rng`.

    Raises:
      ArgumentError: The class is none of experiments, or has methods of jaxline's that
        nothing calls here.
    """
    if not hasattr(experiment_class, "CHECKPOINT_ATTRS"):
        raise ArgumentError(
            "`experiment_class` must be a subclass of `AbstractExperiment`, got "
            f"{experiment_class!r}. Derive it from `experiment.AbstractExperiment`."
        )
    for name in _NOT_CALLED:
        if hasattr(experiment_class, name):
            raise ArgumentError(
                f"`experiment_class` must not define `{name}`, got "
                f"{experiment_class.__name__}: nothing calls it here. Move what it "
                "does into `step`, or into `hooks`."
            )
    arguments = dict(field(config, "experiment_kwargs").items())
    if "init_rng" in inspect.signature(experiment_class).parameters:
        arguments["init_rng"] = rng
    return experiment_class(mode, **arguments)


class _Run:
    """An experiment, and how far it is."""

    def __init__(self, experiment_class: Any, config: Any) -> None:
        rng = jax.random.PRNGKey(field(config, "random_seed"))
        step_rng, init_rng = jax.random.split(rng)
        if field(config, "legacy_random_seed_behavior"):
            step_rng = init_rng = rng
        experiment = make_experiment(experiment_class, "train", init_rng, config)
        rows = experiment.initialize_train_step_rng(step_rng)
        require_equal_rows(rows)
        self.progress = Progress(experiment=experiment, rng=rows, step=0)
        self.config = config
        self._advance = next_keys(field(config, "random_mode_train"))
        self._count: Any = None
        own_end = type(experiment).should_run_step is not (
            AbstractExperiment.should_run_step
        )
        self.steps = None if own_end else int(field(config, "training_steps"))

    def open_checkpoints(
        self, directory: Path, phases: Phases, preemption: Preemption | None
    ) -> list[Hook]:
        """Go on from what was saved; return the hooks that save."""
        config, progress = self.config, self.progress
        kept = Retention(keep_last=field(config, "max_checkpoints_to_keep"))
        when = schedule(config, "save_checkpoint_interval", "checkpoint_interval_type")
        saves = Saves(CheckpointStore(directory, policy=kept).open(), when, progress)
        try:
            with phases.during("restore"):
                found = saves.restore()
            if not found and field(config, "save_initial_train_checkpoint"):
                with phases.during("save"):
                    saves.save_first()
        except BaseException:
            saves.close()
            raise
        if preemption is None:
            return [saves]
        leave = LeaveSaved(
            preemption,
            saves.on_end,
            phases=phases,
            first_step=progress.step,
            last_step=self.steps,
        )
        return [saves, leave]

    def step(self, experiment: AbstractExperiment, turn: Any) -> tuple[Any, PyTree]:
        """Make one update: the loop's step."""
        progress = self.progress
        if self._count is None:
            # One behind: `advance` adds one.
            self._count = np.full(jax.local_device_count(), progress.step - 1, np.int32)
        self._count, own, progress.rng = self._advance(self._count, progress.rng)
        written = experiment.step(
            global_step=self._count, rng=own, writer=ScalarWriter(progress.writer)
        )
        progress.step += 1
        return experiment, dict(written or {})


@dataclasses.dataclass(frozen=True)
class _Turn:
    """One step's batch, of which the loop sees nothing."""

    value: None = None
    examples: int = 0
    steps: int = 1
    position: None = None


class _Turns:
    """Batches for the loop, as long as the experiment wants to go on."""

    stall_s = 0.0

    def __init__(self, run: _Run) -> None:
        self._run = run

    def __next__(self) -> _Turn:
        progress = self._run.progress
        if not progress.experiment.should_run_step(progress.step, self._run.config):
            raise StopIteration
        return _Turn()

    def close(self) -> None:
        """Nothing is held."""


def _open_records(
    config: Any,
    directory: Path | None,
    progress: Progress,
    display: bool,
) -> list[Hook]:
    if jax.process_index() > 0:
        return []
    reports: list[Hook] = [Report(make_display())] if display else []
    when = schedule(config, "log_train_data_interval", "logging_interval_type")
    if directory is None or when is None:
        return reports
    if progress.step == 0:
        set_aside(directory)
    else:
        # What came after the last checkpoint is done again, and written again.
        drop_after(directory / "metrics.jsonl", step=progress.shown_steps)
    write_run_record(
        directory, seed=field(config, "random_seed"), arguments={"config": str(config)}
    )
    if field(config, "log_all_train_data"):
        when = every(n_steps=1)
    progress.writer = WithoutExamples(directory_writer(directory))
    return [*reports, WriteMetrics(progress.writer, when)]
