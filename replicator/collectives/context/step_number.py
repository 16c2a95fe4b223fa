"""Number of updates of a run before the step that is traced.

The number is a JAX user context, as the position among microbatches is: a jitted
function that asks for it is traced anew for each step that is traced.
"""

import dataclasses
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from replicator.errors import ArgumentError


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """A number, compared by identity: as a key of a trace cache it is of one trace."""

    number: jax.Array


_here = jax.make_user_context(None)


def in_step(number: jax.Array) -> AbstractContextManager[None]:
    """Make `number` that of the step inside a `with` block, while it is traced."""
    return _here(_Step(number))


def step_number() -> Int32[Array, ""]:
    """Return the number of updates that the run made before this one.

    It is the same on all replicas and in all microbatches, counts on where a run goes
    on from a checkpoint, and is right for each update of `steps_per_call`: for a
    schedule of one's own, a warm-up, or work at every n-th update. Updates that were
    left out for a bad number count, too.

    Returns:
      An int32 scalar; 0 at the first update.

    Raises:
      ArgumentError: This is not a step of a run: a loop of one's own has no count.

    >>> def step_fn(state, batch):        # warm up over 100 updates
    ...     rate = jnp.minimum(step_number() / 100, 1.0)
    ...     return state, {"rate": rate}
    """
    here = _here.value
    if here is None:
        raise ArgumentError(
            "`step_number` must be called in a step of `rep.run`, got a call outside "
            "of one. In a loop of your own keep an int32 counter in the state, and add "
            "1 in the step: it moves once per update."
        )
    return jnp.asarray(here.number, jnp.int32)
