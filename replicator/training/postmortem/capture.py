"""Make a bundle when a run dies: cheap while it lives, thorough afterwards.

A step's state is donated to the next step, and a bad number is noticed late. So the
state before the bad step is computed again, from the last checkpoint, with the same
keys and batches: to the same bits. While a run is well this costs nothing.
"""

import logging
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax

from replicator.base.types import Key, PyTree
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.training.postmortem.bundle import Bundle, arrays_of, write_bundle
from replicator.training.postmortem.recorded_program import (
    RecordedProgram,
    export_program,
    record_program,
)

_log = logging.getLogger(__name__)


class Stepped(Protocol):
    """A batch for one call."""

    @property
    def steps(self) -> int: ...  # noqa: D102


Batch = TypeVar("Batch", bound=Stepped)


def rebuild(
    step: Callable[[PyTree, Batch], tuple[PyTree, PyTree]],
    state: PyTree,
    batches: Any,
    *,
    start_step: int,
    bad_step: int,
    most_calls: int = 1000,
) -> tuple[PyTree, Batch] | None:
    """Do a run's steps again, up to the call that made the bad one.

    Args:
      step: The run's own, compiled; takes over `state`.
      state: Of a checkpoint before the bad step.
      batches: The run's input, opened where that checkpoint was.
      start_step: Updates that `state` has behind it.
      bad_step: The step that went bad.
      most_calls: Give up if it takes more.

    Returns:
      The state before the call, and the batch of the call; None if it is too far, or
      the input has ended.
    """
    done = start_step
    for _ in range(most_calls):
        batch = next(batches, None)
        if batch is None:
            return None
        if done + batch.steps >= bad_step:
            return state, batch
        state, _ = step(state, batch)
        done += batch.steps
    return None


def write_post_mortem(
    run_directory: str | os.PathLike[str],
    failure: BaseException,
    *,
    step: int,
    update: KeyedStep,
    state: PyTree | None,
    batch: PyTree | None,
    key: Key | None = None,
    about: Mapping[str, Any] | None = None,
) -> Path | None:
    """Write what is known of a step that failed; never fail oneself.

    Args:
      run_directory: The bundle goes to `postmortem/<step>` in it.
      failure: What ended the run.
      step: The step that failed.
      update: What one replica does; see `one_replica_update`.
      state: Before the call, as its first replica had it; None if it is lost.
      batch: Of the call, whole; None if it is lost.
      key: That the step was called with, if it was.
      about: Plain values to write beside: configuration, versions, checkpoint.

    Returns:
      The bundle's directory; None if it could not be written. The reason is logged.
    """
    try:
        bundle = _bundle(
            failure,
            step=step,
            update=update,
            state=state,
            batch=batch,
            key=key,
            about=dict(about or {}),
        )
        return write_bundle(run_directory, bundle)
    except Exception as problem:
        # The run's own failure is what its user must see.
        _log.warning("No post-mortem bundle was written: %r", problem)
        return None


def _bundle(
    failure: BaseException,
    *,
    step: int,
    update: KeyedStep,
    state: PyTree | None,
    batch: PyTree | None,
    key: Key | None,
    about: dict[str, Any],
) -> Bundle:
    program, exported = None, None
    if state is not None and batch is not None:
        program = _recorded(update, state, batch, key)
    if program is not None:
        exported = export_program(program, *jax.tree.leaves((state, batch, key)))
        about |= {"places": as_json(program), "outputs": list(program.outputs)}
    return Bundle(
        step=step,
        error={
            "type": type(failure).__name__,
            "message": str(failure),
            "traceback": "".join(traceback.format_exception(failure)),
        },
        state=None if state is None else arrays_of(state),
        batch=None if batch is None else arrays_of(batch),
        key=None if key is None else arrays_of(key)[""],
        jaxpr=None if program is None else program.jaxpr,
        exported=exported,
        about=about,
    )


def as_json(program: RecordedProgram) -> list[dict[str, Any]]:
    """Return the places of a program as plain values."""
    return [
        {
            "primitive": place.primitive,
            "line": place.line,
            "turns": place.turns,
            "order": list(place.order),
            "needs": list(place.needs),
            "given_inf": place.given_inf,
        }
        for place in program.places
    ]


def _recorded(
    update: KeyedStep, state: PyTree, batch: PyTree, key: Key | None
) -> RecordedProgram | None:
    try:
        return record_program(update, state, batch, key)
    except Exception as problem:
        # A step may be made for the batch of one of several replicas.
        _log.warning("The step could not be recorded as one replica: %r", problem)
        return None
