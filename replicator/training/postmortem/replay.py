"""Run a bundle's step again on one device, and find where a number first went bad."""

import dataclasses
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.trees import first_difference, named_leaves, nested
from replicator.base.types import InitFn, PyTree, StepFn
from replicator.engine.step.state import RunState
from replicator.errors import ArgumentError
from replicator.training.postmortem.bundle import Bundle
from replicator.training.postmortem.recorded_program import (
    one_replica_update,
    record_program,
)
from replicator.training.postmortem.watched import FirstBad, Place, first_bad


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of a replay.

    Attributes:
      inputs: Leaves of state and batch that were not finite before the step.
      outputs: Leaves of state and metrics that are not finite after it.
      nan: Equation of the first NaN, if the step made one.
      infinity: Equation of the first infinity, likewise.
    """

    inputs: Sequence[str]
    outputs: Sequence[str]
    nan: FirstBad | None
    infinity: FirstBad | None

    def describe(self) -> str:
        """Return it as text, a line for each finding.

        >>> found = Verdict(inputs=["batch/x"], outputs=["a"], nan=None, infinity=None)
        >>> print(found.describe().splitlines()[0])
        not finite before the step: batch/x
        """
        lines = [f"not finite before the step: {name}" for name in self.inputs]
        if self.infinity is not None:
            lines.append(f"first infinity: {self.infinity.describe()}")
        if self.nan is not None:
            lines.append(f"first NaN: {self.nan.describe()}")
        lines += [f"not finite after the step: {name}" for name in self.outputs]
        if not self.outputs:
            lines.append(
                "all finite after the step: on one device it is not reproduced"
            )
        return "\n".join(lines)


def replay_recorded(bundle: Bundle) -> Verdict:
    """Run the program of a bundle, without the user's code.

    Raises:
      ArgumentError: The bundle lacks the program, the state or the batch.
    """
    if bundle.exported is None:
        raise ArgumentError(
            "`directory` must hold a program to replay it without its code, got none. "
            "Pass `--step module:step_fn --init module:init_fn`."
        )
    state, batch = _require_arrays(bundle)
    leaves = [*state.values(), *batch.values()]
    exported = jax.export.deserialize(bytearray(bundle.exported))
    outputs, when = exported.call(*leaves)
    places = [_place(each) for each in bundle.about["places"]]
    return _verdict(bundle, bundle.about["outputs"], outputs, when, places)


def replay_step(bundle: Bundle, step_fn: StepFn, init_fn: InitFn) -> Verdict:
    """Run the user's step on the state and the batch of a bundle.

    Args:
      bundle: A bundle with state and batch.
      step_fn: The step; it may have been changed since, to try a remedy.
      init_fn: Gives the state its structure; it is traced, not run.

    Raises:
      ArgumentError: The bundle lacks state or batch, or `init_fn` makes another state.
    """
    _require_arrays(bundle)
    state = _state_like(bundle, init_fn)
    assert bundle.batch is not None
    batch = _nested(bundle.batch)
    update = one_replica_update(
        step_fn,
        counted=isinstance(state, RunState),
        steps_per_call=bundle.updates_per_call,
    )
    program = record_program(update, state, batch)
    leaves = jax.tree.leaves((state, batch))
    outputs, when = jax.jit(program.run)(*leaves)
    return _verdict(bundle, program.outputs, outputs, when, program.places)


def load_function(name: str) -> Any:
    """Import `module:function`, from the working directory, too.

    Raises:
      ArgumentError: There is no such module, or no such function in it.

    >>> load_function("math:sqrt")(4.0)
    2.0
    """
    module_name, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, ValueError) as failure:
        raise ArgumentError(
            f"`--step` and `--init` must name `module:function`, got {name!r}: "
            f"{failure}. Run it in a folder where `import {module_name}` works."
        ) from failure


def _require_arrays(
    bundle: Bundle,
) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
    if bundle.state is None or bundle.batch is None:
        lost = "state" if bundle.state is None else "batch"
        raise ArgumentError(
            f"`directory` must hold state and batch to be replayed, got no {lost}. "
            "Run with `checkpoint_dir`: then they are computed again."
        )
    return bundle.state, bundle.batch


def _state_like(bundle: Bundle, init_fn: InitFn) -> PyTree:
    assert bundle.state is not None
    user = jax.eval_shape(init_fn, jax.random.key(0))
    like = user
    if set(bundle.state) >= {"step", "key"} and "step" not in dict(named_leaves(user)):
        scalar: Any = jax.ShapeDtypeStruct((), np.int32)
        given = bundle.state["key"]
        key: Any = jax.ShapeDtypeStruct(given.shape, given.dtype)
        like = RunState(
            step=scalar,
            key=key,
            user=user,
            skipped=scalar if "skipped" in bundle.state else None,
        )
    want = dict(named_leaves(like))
    difference = first_difference(want, dict(bundle.state))
    if difference is not None:
        raise ArgumentError(
            f"`--init` must make the state of the bundle, got another: {difference}. "
            "Use the function that the run was started with."
        )
    leaves = [jnp.asarray(bundle.state[path]) for path in want]
    return jax.tree.structure(like).unflatten(leaves)


def _nested(arrays: Mapping[str, np.ndarray]) -> PyTree:
    """Make nested dicts of paths: batches of other containers become dicts."""
    if set(arrays) == {""}:
        return jnp.asarray(arrays[""])
    return nested(
        (path.split("/"), jnp.asarray(array)) for path, array in arrays.items()
    )


def _verdict(
    bundle: Bundle,
    names: Sequence[str],
    outputs: Sequence[Any],
    when: Any,
    places: Sequence[Place],
) -> Verdict:
    state, batch = _require_arrays(bundle)
    given = {f"state/{path}": leaf for path, leaf in state.items()}
    given |= {f"batch/{path}": leaf for path, leaf in batch.items()}
    return Verdict(
        inputs=_not_finite(given),
        outputs=_not_finite(
            {name: np.asarray(leaf) for name, leaf in zip(names, outputs, strict=True)}
        ),
        nan=first_bad(places, np.asarray(when), 0),
        infinity=first_bad(places, np.asarray(when), 1),
    )


def _not_finite(arrays: Mapping[str, np.ndarray]) -> list[str]:
    found = []
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            continue
        bad = ~np.isfinite(
            array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
        )
        if bad.any():
            found.append(f"{name} ({int(bad.sum())} of {bad.size})")
    return found


def _place(value: Mapping[str, Any]) -> Place:
    lists = {"order": tuple(value["order"]), "needs": tuple(value["needs"])}
    return Place(**{**value, **lists})
