"""Position of a step among the microbatches of its update.

The position is a JAX user context: part of the key of every `jit` cache, so a jitted
function that asks for it is traced anew for each update and cannot keep a stale answer.
Outside an accumulating step there is one microbatch: the first and the last.
"""

import dataclasses
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, eq=False)
class Microbatch:
    """Position inside one update: `index` (maybe traced) of `count` microbatches.

    Compared by identity: as a key of a trace cache it stands for one trace.

    Attributes:
      index: Number of microbatches before this one.
      count: Number of microbatches of the update.
      last: Whether this is the last one, if that is known by other means; the analysis
        of a step marks `index` and values that wait for the last in different ways.
      real: Whether each microbatch of the update holds a real example on any replica,
        bool [count]; None if that is not known before it has run.
    """

    index: jax.Array | int
    count: int
    last: jax.Array | bool | None = None
    real: jax.Array | None = None


class RealAsked:
    """A note that a step, while it was traced, read which microbatches are real."""

    by_step = False


_position = jax.make_user_context(None)
_asked = jax.make_user_context(None)


def in_microbatch(position: Microbatch) -> AbstractContextManager[None]:
    """Make `position` that of the step inside a `with` block, while it is traced."""
    return _position(position)


def microbatch() -> Microbatch:
    """Return the position of the step being traced; 0 of 1 outside accumulation.

    >>> microbatch().index, microbatch().count
    (0, 1)
    """
    return _position.value or Microbatch(0, 1)


def noting_in(asked: RealAsked) -> AbstractContextManager[None]:
    """Note in `asked` whether a step reads `real`, traced inside a `with` block."""
    return _asked(asked)


def real_microbatches() -> jax.Array | None:
    """Return `Microbatch.real` of the step being traced, and note the call.

    The value takes a collective, which only a step that reads it should have.
    """
    if _asked.value is not None:
        _asked.value.by_step = True
    return microbatch().real


def num_microbatches() -> int:
    """Return the number of microbatches of this update; 1 outside accumulation.

    Returns:
      A Python integer, as `num_replicas()` is: it is known while the step is traced.

    >>> def step_fn(state, batch):                   # count examples, once per update
    ...     here = len(batch["x"]) * num_replicas() * num_microbatches()
    ...     seen = state["seen"] + jnp.where(is_last_microbatch(), here, 0)
    ...     return state | {"seen": seen}, {}
    """
    return microbatch().count


def is_last_microbatch() -> jax.Array:
    """Return whether this call of the step completes its update.

    State that reads the batch (running statistics) moves at every microbatch; it moves
    once per update if it moves only where this is true. State that reads no batch
    (counters, target networks) moves once per update by itself.

    Returns:
      A scalar bool array; always true outside an accumulating step. With
      `wrap_optimizer(accumulate=k)` in a loop of one's own, true at every k-th call.

    >>> def step_fn(state, batch):        # keep the largest loss seen, once per update
    ...     loss = all_reduce(loss_fn(state["params"], batch), "max")
    ...     seen = jnp.maximum(state["largest"], loss)
    ...     largest = jnp.where(is_last_microbatch(), seen, state["largest"])
    ...     return state | {"largest": largest}, {"loss": loss}
    """
    here = microbatch()
    return jnp.asarray(here.index == here.count - 1 if here.last is None else here.last)
