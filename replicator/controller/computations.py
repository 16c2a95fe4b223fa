"""Make computations of equations, each with the specs of its ops on its slice."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from replicator.controller.islands.protocol import Computation
from replicator.controller.layouts import SliceLayout
from replicator.controller.slices import Slice
from replicator.controller.step_calls import StepCall
from replicator.controller.tracing.groups import OpGroup, variables
from replicator.controller.tracing.host_calls import HostCall
from replicator.controller.tracing.trace import Functions, line_of, op_of, shape_of
from replicator.engine.analysis.evaluator import bind, evaluate
from replicator.errors import ArgumentError

_PARTS_OF_BYTES = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")


def computation_of(
    group: OpGroup,
    *,
    whole: core.ClosedJaxpr,
    functions: Functions,
    constants: Mapping[core.Var, Any],
    inputs: Mapping[core.Var, SliceLayout | None],
    outputs: Sequence[core.Var],
    donated: tuple[int, ...],
    is_here: bool,
) -> Computation:
    """Return the computation of a group.

    Args:
      group: The group.
      whole: The traced function that they are of.
      functions: The functions that are ops.
      constants: Values that the traced function closes over.
      inputs: Layout of each value that it takes.
      outputs: Values that it must return.
      donated: Positions of inputs whose memory it may take.
      is_here: Whether its island is in this process.

    Raises:
      ArgumentError: It takes numbers of less than a byte, whose layout JAX mistakes.
    """
    eqns = group.eqns
    ops = [eqn for eqn in eqns if op_of(eqn, functions) is not None]
    name, line = " + ".join(group.names), line_of((ops or eqns)[0], functions)
    shapes = list(map(shape_of, inputs))
    for shape in shapes:
        if str(shape.dtype) in _PARTS_OF_BYTES:
            raise ArgumentError(
                f"op `{name}` must take arrays of whole bytes, got {shape.dtype}"
                f"{list(shape.shape)} at {line}. Pass int8, and cast in its function."
            )
    step = group.step
    is_eager = is_here and isinstance(step, StepCall)
    if step is not None:
        if isinstance(step, HostCall):
            run: Any = step.run_of(eqns[0], inputs, constants, outputs)
        else:
            called = step.run if is_eager else step.traced
            run = functools.partial(_run_step, eqns[0], list(inputs), outputs, called)
        at = [eqns[0].outvars.index(var) for var in outputs]
        layouts = [step.layouts[number] for number in at]
    else:
        part = whole.jaxpr.replace(
            constvars=list(constants),
            invars=list(inputs),
            outvars=list(outputs),
            eqns=eqns,
        )
        closed = core.ClosedJaxpr(part, tuple(constants.values()))
        run = functools.partial(_run, closed, group.slice.mesh, functions)
        layouts = [_chosen(var, eqns, group.slice, functions) for var in outputs]
    return Computation(
        name=name,
        line=line,
        places=group.slice.places,
        run=run,
        shapes=shapes,
        inputs=list(inputs.values()),
        outputs=layouts,
        donated=donated,
        is_eager=is_eager,
        is_host=isinstance(step, HostCall),
        traced_on=step.devices if isinstance(step, StepCall) else (),
    )


def reshard(
    var: core.Var, slice_: Slice, source: SliceLayout, target: SliceLayout
) -> Computation:
    """Return the computation that lays a value out anew on its slice."""
    return Computation(
        name="reshard",
        line="",
        places=slice_.places,
        run=lambda array: [array],
        shapes=[shape_of(var)],
        inputs=[source],
        outputs=[target],
    )


def asked_specs(
    eqns: Sequence[core.JaxprEqn], functions: Functions
) -> dict[core.Var, PartitionSpec]:
    """Return the specs in which ops want values: for each that of the first op."""
    asked: dict[core.Var, PartitionSpec] = {}
    for eqn in eqns:
        if op_of(eqn, functions) is not None:
            for atom, sharding in zip(
                eqn.invars, eqn.params["in_shardings"], strict=True
            ):
                spec = _spec(sharding)
                if spec is not None and not isinstance(atom, core.Literal):
                    asked.setdefault(atom, spec)
    return asked


def alike(
    eqns: Sequence[core.JaxprEqn],
    functions: Functions,
    inputs: Mapping[core.Var, SliceLayout | None],
    outputs: Sequence[core.Var],
    donated: tuple[int, ...],
) -> Any:
    """Return what calls of an op have in common if their computation is the same.

    The name of an op's equation is of one function on one slice, and JAX keeps one
    jaxpr of it for all calls with the same shapes.

    Returns:
      A key; None for a computation of several ops, or with numbers that are part of it.
    """
    taken, number = variables(eqns[0].invars), {var: n for n, var in enumerate(inputs)}
    if len(eqns) > 1 or op_of(eqns[0], functions) is None:
        return None
    if len(taken) < len(eqns[0].invars) or not number.keys() >= set(taken):
        return None
    params = eqns[0].params
    return (
        (params["name"], id(params["jaxpr"]), line_of(eqns[0], functions)),
        tuple(number[var] for var in taken),
        tuple(inputs.values()),
        tuple(eqns[0].outvars.index(var) for var in outputs),
        donated,
    )


def _chosen(
    var: core.Var,
    eqns: Sequence[core.JaxprEqn],
    slice_: Slice,
    functions: Functions,
) -> SliceLayout | None:
    """Return the layout that an op's `out_specs` name for a value."""
    eqn = next(each for each in eqns if var in each.outvars)
    op = op_of(eqn, functions)
    if op is None:
        return None
    spec = _spec(eqn.params["out_shardings"][eqn.outvars.index(var)])
    if spec is None:
        return None
    return slice_.layout(spec)


def _run(
    closed: core.ClosedJaxpr,
    mesh: AbstractMesh,
    functions: Functions,
    *arrays: jax.Array,
) -> list[Any]:
    """Evaluate a computation; its ops' specs are constraints on its slice's mesh."""

    def cut(values: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
        return [
            jax.lax.with_sharding_constraint(value, NamedSharding(mesh, sharding.spec))
            if isinstance(sharding, NamedSharding)
            else value
            for value, sharding in zip(values, shardings, strict=True)
        ]

    def apply(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
        if op_of(eqn, functions) is None:
            return bind(eqn, operands)
        inner = eqn.params["jaxpr"]
        inner = core.ClosedJaxpr(inner.jaxpr, tuple(map(of_host, inner.consts)))
        operands = cut(operands, eqn.params["in_shardings"])
        outs = core.jaxpr_as_fun(inner)(*operands)
        return cut(outs, eqn.params["out_shardings"])

    return evaluate(closed, arrays, apply, constant=lambda value: value)


def _run_step(
    eqn: core.JaxprEqn,
    invars: Sequence[core.Var],
    outvars: Sequence[core.Var],
    call: Callable[..., list[Any]],
    *arrays: jax.Array,
) -> list[Any]:
    values = dict(zip(invars, arrays, strict=True))
    results = call(
        *(x.val if isinstance(x, core.Literal) else values[x] for x in eqn.invars)
    )
    waited = results[: len(results) - len(eqn.outvars)]
    made = dict(zip(eqn.outvars, results[len(waited) :], strict=True))
    return [*waited, *(made[var] for var in outvars)]


def of_host(constant: Any) -> Any:
    """Return a constant that no device of another client holds."""
    is_key = jnp.issubdtype(getattr(constant, "dtype", np.float32), jax.dtypes.extended)
    is_array = isinstance(constant, jax.Array)
    return np.asarray(constant) if is_array and not is_key else constant


def _spec(sharding: object) -> PartitionSpec | None:
    """Return the spec of an equation's sharding; free dimensions are whole."""
    if not isinstance(sharding, NamedSharding):
        return None
    free = PartitionSpec.UNCONSTRAINED
    return PartitionSpec(*(None if each is free else each for each in sharding.spec))
