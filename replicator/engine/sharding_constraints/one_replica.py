"""Trace what the one replica of a partitioned step does, as for one device."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.types import PyTree
from replicator.collectives.context.axes import (
    one_replica_on_many_devices,
    refuse_if_partitioned,
)


def traced_alone(
    fn: Callable[..., Any], given: Sequence[PyTree]
) -> tuple[core.ClosedJaxpr, PyTree]:
    """Trace what the one replica does, without a word of where anything lies.

    Args:
      fn: What it does with its own values.
      given: These; arrays, traced or not, or shapes.

    Returns:
      The jaxpr, and the shapes of what `fn` returns.

    Raises:
      ArgumentError: It asks for what only many replicas have.
    """
    with one_replica_on_many_devices():
        try:
            return jax.make_jaxpr(fn, return_shape=True)(*given)
        except NameError as failure:
            if f"axis name: {REPLICA_AXIS}" not in str(failure):
                raise
        # It calls `lax.pmean("replica")` itself: there are no others to speak to. No
        # value is mapped along this axis of length 1: nothing of it stays in the trace.
        alone = jax.vmap(
            fn, in_axes=None, out_axes=None, axis_name=REPLICA_AXIS, axis_size=1
        )
        try:
            return jax.make_jaxpr(alone, return_shape=True)(*given)
        except AssertionError as failure:
            # What `vmap` says of `lax.pcast(to="varying")`, all that it says.
            if f"varying=frozenset({{'{REPLICA_AXIS}'}})" in str(failure):
                refuse_if_partitioned(
                    f"`lax.pcast` over `{REPLICA_AXIS}`",
                    "Leave it out, or use `strategies.data_parallel()`.",
                )
            raise
        except NotImplementedError as failure:
            # `psum` says nothing else of groups under `vmap`.
            if str(failure) and "axis_index_groups" not in str(failure):
                raise
            refuse_if_partitioned(
                f"`axis_index_groups` of collectives over `{REPLICA_AXIS}`",
                "Leave them out, or use `strategies.data_parallel()`.",
            )
            raise
        except ValueError as failure:
            if "out_axes is None" not in str(failure):
                raise
            refuse_if_partitioned(
                "`lax.axis_index`, `psum_scatter` and `all_to_all` over `replica`",
                "Use `replicator.reduce_scatter` and `replicator.all_to_all`, or "
                "`strategies.data_parallel()`.",
            )
            raise
