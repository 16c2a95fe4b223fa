"""Steps that XLA cuts wrongly without the guards of `engine/sharding_constraints`."""

import functools
from typing import Any

import jax
import optax

from benchmarks.first_update.faults import fault
from replicator.engine.sharding_constraints.guards import GUARDS
from replicator.tuning.problem import ProblemFn


def problem_of(pattern: str, route: str) -> ProblemFn:
    """Return the problem of a fault."""
    return functools.partial(unguarded, pattern, route)


def unguarded(pattern: str, route: str, rep: Any, *, small: bool = False) -> tuple:
    """Return a step of `benchmarks.first_update`, in a process without guards."""
    del small
    GUARDS.clear()
    case = fault(pattern, route)
    init_fn, step_fn = case.parts(
        lambda name="params": rep.wrap_optimizer(optax.adamw(1e-2, eps=1e-4), name=name)
    )
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), case.batch
    )
    return step_fn, init_fn, shapes
