"""Decide for the strategy of a run that has none: as it was, or by a choice."""

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import jax

from replicator.base.mesh import spans_processes
from replicator.base.types import Dataset, InitFn, PyTree, StepFn
from replicator.checkpoint import reading
from replicator.checkpoint.directories.named import checked_directory, open_directory
from replicator.distributed.agreement import exchange
from replicator.engine.auto_microbatch import first_batch
from replicator.engine.first_update.one_device import on_host
from replicator.engine.layout import Layout
from replicator.engine.replicated import ReplicatedLayout
from replicator.engine.sharded_step import CompileOptions
from replicator.engine.step.state import as_arrays
from replicator.errors import ArgumentError, CheckpointError
from replicator.inputs.options import InputOptions
from replicator.strategies.strategy import Strategy
from replicator.strategies.text import from_json
from replicator.tuning.choosing.chooser import choose_for
from replicator.tuning.choosing.decision import Decision
from replicator.tuning.choosing.search import ChoosingOptions
from replicator.tuning.choosing.subject import Subject

_log = logging.getLogger(__name__)


class RunToDecide(Protocol):
    """The options of a run that its choice takes; `RunOptions` has them."""

    @property
    def init_fn(self) -> InitFn | None:
        """Makes the first state; None where that is given."""
        ...

    @property
    def init_state(self) -> PyTree:
        """The first state; None where it is made."""
        ...

    @property
    def seed(self) -> int:
        """Seed of the first state."""
        ...

    @property
    def inputs(self) -> InputOptions | None:
        """Options of reading the dataset."""
        ...

    @property
    def auto_microbatch(self) -> bool:
        """Whether the number of microbatches is to be found."""
        ...

    @property
    def memory_limit_bytes(self) -> int | None:
        """Bytes of a device that it has to fit into."""
        ...

    @property
    def checkpoint_dir(self) -> str | os.PathLike[str] | None:
        """Directory of its checkpoints."""
        ...

    @property
    def display(self) -> bool:
        """Whether progress is shown."""
        ...


def decided_layout(
    decision: Decision,
    step_fn: StepFn | None,
    dataset: Dataset | None,
    options: RunToDecide,
    lifting: CompileOptions,
) -> Layout:
    """Return the layout of a run; decide for its strategy if that is not done yet.

    A run that goes on keeps the decision in its checkpoint, unless there is another
    number of devices now.

    Args:
      decision: The decision of its `Replicator`.
      step_fn: Step of one replica.
      dataset: Training data; its first batch is tried, and read again afterwards.
      options: All other options of the user.
      lifting: Options of lifting a step.

    Raises:
      ArgumentError: The run has no `step_fn` or dataset to try; or as
        `replicator.choose`.
      DeviceMemoryError: No strategy fits.
    """
    if decision.is_made:
        return decision.layout
    assert decision.devices is not None, "the devices are here"
    kept = _kept(decision, options)
    count = decision.devices.size
    if kept is not None and kept["devices"] == count:
        decision.make(_strategy(kept), kept)
        return decision.layout
    _choose(decision, step_fn, dataset, options, lifting)
    assert decision.record is not None, "a choice leaves its record"
    chosen = decision.record["chosen"]
    if kept is not None:
        before = {name: kept.get(name) for name in ("chosen", "devices")}
        decision.record = {**decision.record, "before": before}
        _log.warning(
            "The run goes on under %s on %d devices; it was %s on %d.",
            *(chosen, count, before["chosen"], before["devices"]),
        )
    return decision.layout


def _choose(
    decision: Decision,
    step_fn: StepFn | None,
    dataset: Dataset | None,
    options: RunToDecide,
    lifting: CompileOptions,
) -> None:
    if step_fn is None or dataset is None:
        raise ArgumentError(
            '`dataset` must be given, and a `step_fn`, with `strategy="auto"`, got '
            "None. Use `replicator.choose(step_fn, init_fn, batch).replicator`."
        )
    if options.auto_microbatch:
        raise ArgumentError(
            '`auto_microbatch` must be False with `strategy="auto"`, got True. Choose '
            "`accumulate`; where nothing fits, the error says which does."
        )
    assert decision.devices is not None, "the devices are here"
    count = decision.devices.size
    shows = options.display and jax.process_index() == 0 and sys.stderr is not None

    def note(text: str) -> None:
        if shows:
            print(text, file=sys.stderr, flush=True)

    note(f"choosing a strategy for {count} devices")
    every = ReplicatedLayout(decision.devices)
    inputs = options.inputs or InputOptions()
    subject = Subject(
        step_fn=step_fn,
        init_fn=options.init_fn,
        init_state=None if options.init_fn else on_host(as_arrays(options.init_state)),
        batch=first_batch(dataset, every, inputs, why='strategy="auto"'),
        decision=decision,
        options=dataclasses.replace(lifting, steps_per_call=1, checks=None),
        seed=options.seed,
    )
    limit_bytes = options.memory_limit_bytes
    limits = ChoosingOptions(memory_limit_bytes=limit_bytes)
    note(str(choose_for(subject, limits, note)))


def _strategy(record: Mapping[str, Any]) -> Strategy:
    return from_json(json.dumps(record["strategy"]))


def _kept(decision: Decision, options: RunToDecide) -> Mapping[str, Any] | None:
    """Return the decision in the newest checkpoint; in all processes the first's."""
    found = _read(options)
    assert decision.devices is not None, "the devices are here"
    if spans_processes(decision.devices):
        found = exchange("choose/kept", found)[0]
    return found


def _read(options: RunToDecide) -> Mapping[str, Any] | None:
    place = checked_directory("checkpoint_dir", options.checkpoint_dir)
    if place is None:
        return None
    try:
        manifests = reading.scan(open_directory(place)).manifests
    except CheckpointError:  # none yet; what is damaged is refused when it is opened
        return None
    return manifests[-1].meta.get("choice") if manifests else None
