"""The step that `rep.compile` returns, as an op.

On an island of this process it runs as it is. To others its program is sent.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_context
from jax.sharding import NamedSharding

from replicator.base.types import Device, PyTree
from replicator.controller.layouts import SliceLayout
from replicator.controller.slices import Slice
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.inspection.step_results import (
    StepProgram,
    step_devices,
    step_program,
    step_results,
)
from replicator.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepCall:
    """A step for arguments of one structure.

    Attributes:
      step: The step.
      arguments: Its arguments, as shapes.
      tree: Structure of these.
      shapes: Of its results, in leaf order.
      layouts: Layout of each result.
    """

    step: CompiledStep
    arguments: Sequence[PyTree]
    tree: Any
    shapes: Sequence[jax.ShapeDtypeStruct]
    layouts: Sequence[SliceLayout]

    def run(self, *leaves: Any) -> list[Any]:
        """Make an update; return what to wait for, and the leaves of the results."""
        state, metrics = self.step(*jax.tree.unflatten(self.tree, leaves))
        # The state may be donated to the next update before somebody waits for it.
        waited = jax.tree.leaves(metrics) or [jnp.copy(jax.tree.leaves(state)[0])]
        return [waited, *jax.tree.leaves((state, metrics))]

    @functools.cached_property
    def program(self) -> StepProgram:
        """Its program, for islands elsewhere."""
        return step_program(self.step, *self.arguments)

    @property
    def inputs(self) -> Sequence[SliceLayout]:
        """Layout of each argument of its program."""
        return list(map(_layout, self.program.inputs))

    @property
    def devices(self) -> Sequence[Device]:
        """Devices that its program is traced for."""
        return step_devices(self.step)

    def traced(self, *leaves: Any) -> list[Any]:
        """Return the leaves of the results, as its program computes them."""
        results = self.program.run(*jax.tree.unflatten(self.tree, leaves))
        return jax.tree.leaves(results)


class StepTracer:
    """Stand for a step in a trace: one equation, which donates the state.

    Args:
      step: The step.
      on: Its slice.
      register: Returns the name of the equations of a call.

    Raises:
      ArgumentError: The step was compiled for other devices.
    """

    def __init__(
        self, step: CompiledStep, on: Slice, register: Callable[[StepCall], str]
    ) -> None:
        if set(step_devices(step)) != set(on.devices):
            raise ArgumentError(
                f"`f` must be compiled for the devices of its slice, got a step for "
                f"{step_devices(step)} and {on}. Make it by "
                "`Replicator(devices=slice.devices)`."
            )
        self._step = step
        self._register = register
        self._calls: dict[Any, tuple[Callable[..., Any], Any]] = {}

    def __call__(self, *args: PyTree) -> PyTree:
        """Return the results of the step, traced."""
        leaves, tree = jax.tree.flatten(args)
        shapes = [
            jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
            for leaf in leaves
        ]
        key = tree, tuple((shape.shape, shape.dtype) for shape in shapes)
        if key not in self._calls:
            self._calls[key] = self._traced(tree, shapes)
        run, results = self._calls[key]
        return jax.tree.unflatten(results, run(*leaves))

    def _traced(
        self, tree: Any, shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> tuple[Callable[..., Any], Any]:
        state, batch, *key = jax.tree.unflatten(tree, shapes)
        batch = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), batch)
        with eval_context():
            found = step_results(self._step, state, batch, *key)
        results, results_tree = jax.tree.flatten(found.shapes)
        call = StepCall(
            step=self._step,
            arguments=jax.tree.unflatten(tree, shapes),
            tree=tree,
            shapes=results,
            layouts=list(map(_layout, found.shardings)),
        )

        # It is never run: the island calls the step. JAX refuses to map a callback.
        called = jax.custom_jvp(
            lambda *leaves: jax.pure_callback(call.run, results, *leaves)
        )
        called.defjvp(_refuse_gradient)

        def run(*leaves: jax.Array) -> Any:
            return called(*leaves)

        run.__name__ = self._register(call)
        donated = tuple(range(len(jax.tree.leaves(state))))
        return jax.jit(run, donate_argnums=donated), results_tree


def _layout(sharding: NamedSharding) -> SliceLayout:
    return SliceLayout(axes=tuple(sharding.mesh.shape.items()), spec=sharding.spec)


def _refuse_gradient(*_: Any) -> Any:
    raise ArgumentError(
        "a step of `rep.compile` must not be differentiated, got a call under "
        "`jax.grad`. It computes its gradients itself: call it as it is."
    )
