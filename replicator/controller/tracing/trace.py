"""Trace a function that calls ops into equations: one for each sharded computation.

Each function of `pw.fn` is jitted under a name of its own, which survives `jax.grad`
and `jax.vmap`: an equation of that name is an op. All others are stray operations.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core

from replicator.base.types import PyTree
from replicator.controller.slices import Slice
from replicator.controller.step_calls import StepCall
from replicator.controller.tracing.host_calls import HostCall
from replicator.engine.analysis.dataflow import equations, sub_jaxprs
from replicator.engine.analysis.evaluator import (
    CALLS,
    REMAT,
    bind,
    evaluate,
    held_program,
)
from replicator.engine.analysis.source_lines import UNKNOWN_LINE, user_line
from replicator.errors import ArgumentError

_MOST_CONSTANT_BYTES = 100 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpFunction:
    """A function bound to a slice, as its equations name it.

    Attributes:
      label: Its name, for people.
      slice: Where it runs.
      line: Line at which it is defined.
      step: The step that `rep.compile` returns, or the function of `pw.host`, if it is
        one: it runs as it is.
    """

    label: str
    slice: Slice
    line: str = UNKNOWN_LINE
    step: StepCall | HostCall | None = None


Functions = Mapping[str, OpFunction]
"""By the name of their equations."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """A traced function.

    Attributes:
      closed: Its equations: ops and stray operations, none hidden in others.
      out_tree: Structure of its results.
    """

    closed: core.ClosedJaxpr
    out_tree: Any


def trace(
    fn: Callable[..., PyTree], arguments: Sequence[PyTree], functions: Functions
) -> Traced:
    """Trace a function that calls ops.

    Args:
      fn: The function.
      arguments: Shapes of its arguments.
      functions: The functions that are ops.

    Raises:
      ArgumentError: An op is hidden in an operation of JAX, or it or the function
        closes over too much, or the function returns nothing.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    if not jax.tree.leaves(shapes) and not closed.effects:
        raise ArgumentError(
            f"`pw.program` must be given a function that returns results of ops, got "
            f"{jax.tree.unflatten(jax.tree.structure(shapes), ())} from one. Return "
            "what its ops return."
        )
    if _has_constants(closed) or any(_holds_op(eqn, functions) for eqn in closed.eqns):
        closed = jax.make_jaxpr(
            lambda *values: list(map(_made, _inlined(closed, values, functions)))
        )(*map(shape_of, closed.jaxpr.invars))
    for eqn in closed.eqns:
        _check(eqn, functions)
        _check_constants("the dataflow", closed.consts, line_of(eqn, functions))
    return Traced(closed=closed, out_tree=jax.tree.structure(shapes))


def shape_of(atom: core.Var | core.Literal) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a value."""
    aval: Any = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _has_constants(closed: core.ClosedJaxpr) -> bool:
    """Return whether a result is a number that was computed of nothing: a zero."""
    return any(isinstance(atom, core.Literal) for atom in closed.jaxpr.outvars)


def _made(result: Any) -> Any:
    """Return a result as one of an operation, which a slice can run."""
    if isinstance(result, Tracer):
        return result
    return jax.lax.optimization_barrier(result)  # a copy would be left out


def op_of(eqn: core.JaxprEqn, functions: Functions) -> OpFunction | None:
    """Return the function of an equation that is an op."""
    is_call = eqn.primitive.name in ("jit", "pjit")
    return functions.get(eqn.params["name"]) if is_call else None


def ops_of(
    eqns: Iterable[core.JaxprEqn], functions: Functions
) -> Iterator[tuple[str, OpFunction]]:
    """Yield the name and function of each equation that is an op."""
    for eqn in eqns:
        op = op_of(eqn, functions)
        if op is not None:
            yield eqn.params["name"], op


def line_of(eqn: core.JaxprEqn, functions: Functions) -> str:
    """Return the user's line of an equation.

    JAX has none of an op that is called outside of a dataflow: it is the function's.
    """
    op = op_of(eqn, functions)
    return user_line(eqn, caller=op.line if op is not None else UNKNOWN_LINE)


def _holds_op(eqn: core.JaxprEqn, functions: Functions) -> bool:
    """Return whether there is an op inside an equation that is none."""
    return op_of(eqn, functions) is None and any(_inner_ops(eqn, functions))


def _inner_ops(eqn: core.JaxprEqn, functions: Functions) -> Iterator[OpFunction]:
    for jaxpr in sub_jaxprs(eqn):
        for _, op in ops_of(equations(jaxpr), functions):
            yield op


def _inlined(
    closed: core.ClosedJaxpr, values: Sequence[Any], functions: Functions
) -> list[Any]:
    """Evaluate a jaxpr; a jitted function that holds ops is opened."""

    def apply(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
        held = held_program(eqn)
        is_call = eqn.primitive.name in CALLS and _holds_op(eqn, functions)
        if is_call and held is not None:
            return _inlined(held, operands, functions)
        return bind(eqn, operands)

    return evaluate(closed, values, apply, constant=lambda value: value)


def _check(eqn: core.JaxprEqn, functions: Functions) -> None:
    function, line = op_of(eqn, functions), line_of(eqn, functions)
    for op in _inner_ops(eqn, functions):
        is_remat = eqn.primitive.name in REMAT
        where = "checkpoint" if is_remat else eqn.primitive.name
        where = function.label if function else where
        raise ArgumentError(
            f"op `{op.label}` must be called by the dataflow itself, got a call inside "
            f"of `{where}` at {line}. Call it in a Python loop or function, or "
            f"make `{where}` one op with all of it."
        )
    held = held_program(eqn)
    if held is not None and function is not None:
        _check_constants(f"op `{function.label}`", held.consts, line)


def _check_constants(what: str, constants: Sequence[Any], line: str) -> None:
    size = sum(getattr(const, "nbytes", 0) for const in constants)
    if size > _MOST_CONSTANT_BYTES:
        raise ArgumentError(
            f"{what} must take large arrays as arguments, got "
            f"{size >> 20} MiB that it closes over, at {line}. Place them once with "
            "`pw.put(arrays, slice)`, and pass what that returns."
        )
