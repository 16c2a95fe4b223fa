"""Record a step's program so that it runs anywhere, without the user's code.

The step of one replica on the whole global batch is traced, watched (see `watched`),
and exported as StableHLO, which later versions of JAX run on one device of any kind.
The exported program is data: neither Python nor a pickle is in it.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicator.base.per_replica import is_per_replica
from replicator.base.trees import named_leaves
from replicator.base.types import PyTree, StepFn
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.engine.step.transforms import (
    count_steps,
    lift,
    repeat_steps,
    report_norms,
)
from replicator.training.postmortem.watched import Place, watched

_PLATFORMS = ("cpu", "cuda", "tpu")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedProgram:
    """A step as one replica runs it.

    Attributes:
      run: `run(*leaves of (state, batch)) -> (leaves of the outputs, when)`, to be
        jitted; see `watched`.
      jaxpr: The program as text, with the user's lines.
      places: Its equations.
      outputs: Paths of its outputs: `state/user/params/w`, `metrics/loss`.
    """

    run: Callable[..., tuple[list, jax.Array]]
    jaxpr: str
    places: Sequence[Place]
    outputs: Sequence[str]


def one_replica_update(
    step_fn: StepFn, *, counted: bool = True, steps_per_call: int = 1
) -> KeyedStep:
    """Return the function of one replica in a call, without microbatches.

    Args:
      step_fn: Step of the user.
      counted: Whether the state is a `RunState`.
      steps_per_call: Number of updates per call.
    """
    update = lift(step_fn, measures=counted)
    if counted:
        update = report_norms(count_steps(update), among_metrics=True)
    return repeat_steps(update) if steps_per_call > 1 else update


def joined_batch(batch: PyTree, *, accumulate: int, steps_per_call: int) -> PyTree:
    """Undo the cut into microbatches: leaves [B, ...], or [n, B, ...] for n steps."""
    if accumulate == 1:
        return batch
    depth = int(steps_per_call > 1)

    def join(leaf: Any) -> Any:
        shape = leaf.shape
        return leaf.reshape(*shape[:depth], -1, *shape[depth + 2 :])

    return jax.tree.map(join, batch)


def record_program(update: KeyedStep, state: PyTree, batch: PyTree) -> RecordedProgram:
    """Trace and watch an update of one replica.

    Args:
      update: The update from `one_replica_update`.
      state: State of one replica; arrays or shapes.
      batch: The whole global batch; arrays or shapes.

    Returns:
      The program. Nothing is compiled yet.
    """

    def call(state: PyTree, batch: PyTree) -> dict[str, PyTree]:
        after, metrics = update(state, batch, None)  # its key is in the state
        # `PerReplica` metrics are those of one replica here.
        plain = jax.tree.map(
            lambda node: node.value if is_per_replica(node) else node,
            metrics,
            is_leaf=is_per_replica,
        )
        return {"metrics": plain, "state": after}

    run, places, closed = watched(call, state, batch)
    outputs = jax.eval_shape(call, state, batch)
    return RecordedProgram(
        run=run,
        jaxpr=closed.jaxpr.pretty_print(source_info=True),
        places=places,
        outputs=[path for path, _ in named_leaves(outputs)],
    )


def export_program(program: RecordedProgram, *leaves: Any) -> bytes | None:
    """Serialize a program for every platform that can run it.

    Args:
      program: The program from `record_program`.
      *leaves: Its arguments; arrays or shapes.

    Returns:
      The serialized program; None if it cannot be exported: `flatbuffers` is not
      installed, or an operation has no StableHLO. The reason is logged.
    """
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    for platforms in (_PLATFORMS, None):
        try:
            exported = jax.export.export(jax.jit(program.run), platforms=platforms)
            return bytes(exported(*shapes).serialize())
        except Exception as failure:
            # Any error: a run is dying, and must not die of this one instead.
            _log.warning("The step could not be exported: %r", failure)
    return None
