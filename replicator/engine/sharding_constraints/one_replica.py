"""Trace the one replica of a partitioned step, as for one device."""

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
    """Trace the function of the one replica, without constraints.

    Args:
      fn: Function of its own values.
      given: These values; arrays, traced or not, or shapes.

    Returns:
      The jaxpr, and the shapes of the results of `fn`.

    Raises:
      ArgumentError: It calls a function that is for many replicas only.

    >>> _, shapes = traced_alone(lambda x: 2.0 * x, [jnp.ones(3)])
    >>> shapes.shape
    (3,)
    """
    with one_replica_on_many_devices():
        try:
            return jax.make_jaxpr(fn, return_shape=True)(*given)
        except NameError as failure:
            if f"axis name: {REPLICA_AXIS}" not in str(failure):
                raise
        # It calls `lax.pmean("replica")` itself: there is one replica. No value is
        # mapped along this axis of length 1: nothing of it stays in the trace.
        alone = jax.vmap(
            fn, in_axes=None, out_axes=None, axis_name=REPLICA_AXIS, axis_size=1
        )
        try:
            return jax.make_jaxpr(alone, return_shape=True)(*given)
        except AssertionError as failure:
            # The error of `vmap` for `lax.pcast(to="varying")`.
            if f"varying=frozenset({{'{REPLICA_AXIS}'}})" in str(failure):
                refuse_if_partitioned(
                    f"`lax.pcast` over `{REPLICA_AXIS}`",
                    "Leave it out, or use `strategies.data_parallel()`.",
                )
            raise
        except NotImplementedError as failure:
            # The error of `psum` for groups under `vmap` may be empty.
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
