"""Functions of the host in a trace: what `pw.host` makes of one."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend import core

from replicator.base.types import PyTree
from replicator.controller.islands.running.host_run import HostFunction, HostRun
from replicator.controller.layouts import SliceLayout
from replicator.controller.slices import Slice
from replicator.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HostCall:
    """A function of the host for arguments of one structure.

    Attributes:
      function: The function.
      label: Its name.
      tree: Structure of its arguments.
      shapes: What it returns.
      layouts: Layout of each result, in leaf order.
    """

    function: HostFunction
    label: str
    tree: Any
    shapes: PyTree
    layouts: Sequence[SliceLayout]

    def run_of(
        self,
        eqn: core.JaxprEqn,
        inputs: Mapping[core.Var, Any],
        constants: Mapping[core.Var, Any],
        results: Sequence[core.Var],
    ) -> HostRun:
        """Return what an island runs for an equation, given the inputs it has.

        Raises:
          ArgumentError: It was traced under `jax.vmap`.
        """
        said = [shape.shape for shape in jax.tree.leaves(self.shapes)]
        avals: list[Any] = [var.aval for var in eqn.outvars]
        if (found := [aval.shape for aval in avals]) != said:
            raise ArgumentError(
                f"`{self.label}` of `pw.host` must not be mapped, got a call under "
                f"`jax.vmap` that returns shapes {found}, not {said}. Pass it the "
                "whole arrays."
            )
        at = {var: number for number, var in enumerate(inputs)}
        return HostRun(
            function=self.function,
            label=self.label,
            tree=self.tree,
            operands=[
                (None, np.asarray(x.val))
                if isinstance(x, core.Literal)
                else (at.get(x), constants.get(x))
                for x in eqn.invars
            ],
            shapes=self.shapes,
            results=[eqn.outvars.index(var) for var in results],
        )


class HostTracer:
    """Stand for a function of the host in a trace: one equation, with an effect.

    Args:
      fn: The function.
      label: Its name.
      result: Tree of shapes and dtypes of what it returns.
      on: Its slice.
      register: Returns the name of the equations of a call.

    Raises:
      ArgumentError: `result` is no such tree.
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        label: str,
        result: PyTree,
        on: Slice,
        register: Callable[[HostCall], str],
    ) -> None:
        leaves = jax.tree.leaves(result)
        if not leaves or not all(map(_is_of_numpy, leaves)):
            raise ArgumentError(
                "`result` must be a tree of shapes and dtypes of NumPy, got "
                f"{result!r}. Pass a `jax.ShapeDtypeStruct` for each array that the "
                "function returns."
            )
        self._function, self._label, self._register = HostFunction(fn), label, register
        self._shapes = jax.tree.map(_shape, result)
        self._layouts = [on.layout()] * len(leaves)
        self._calls: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: PyTree) -> PyTree:
        """Return the results of the function, traced."""
        leaves, tree = jax.tree.flatten(args)
        for leaf in leaves:
            if _is_key(jnp.result_type(leaf)):
                raise ArgumentError(
                    f"`{self._label}` of `pw.host` must take arrays of NumPy, got "
                    f"{jnp.result_type(leaf)}. Pass `jax.random.key_data(key)`, and "
                    "call `jax.random.wrap_key_data` in it."
                )
        if tree not in self._calls:
            self._calls[tree] = self._traced(tree)
        return self._calls[tree](*leaves)

    def _traced(self, tree: Any) -> Callable[..., Any]:
        call = HostCall(
            function=self._function,
            label=self._label,
            tree=tree,
            shapes=self._shapes,
            layouts=self._layouts,
        )
        label = self._label

        # It is never run: the island calls the function. The effect has it called
        # though nobody takes its results.
        @jax.custom_jvp
        def called(*leaves: jax.Array) -> Any:
            return io_callback(_never, call.shapes, *leaves)

        @called.defjvp
        def refuse(*_: Any) -> Any:
            raise ArgumentError(
                f"`{label}` of `pw.host` must not be differentiated, got a call under "
                "`jax.grad`. Call it before, and pass what it returns."
            )

        def run(*leaves: jax.Array) -> Any:
            return called(*leaves)

        run.__name__ = self._register(call)
        return jax.jit(run)


def _never(*_: Any) -> Any:
    raise AssertionError("an op of the host is run by its island")


def _is_of_numpy(leaf: Any) -> bool:
    if not isinstance(getattr(leaf, "shape", None), tuple):
        return False
    return hasattr(leaf, "dtype") and not _is_key(leaf.dtype)


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)
