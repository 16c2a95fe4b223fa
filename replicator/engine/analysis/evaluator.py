"""Evaluate a jaxpr equation by equation, by a function of the caller."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from jax.extend import core, source_info_util

Value = TypeVar("Value")

# They run the one jaxpr that they hold once; nothing differentiates them any more.
CALLS = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    }
)
REMAT = frozenset({"checkpoint", "remat", "remat2"})


def evaluate(
    closed: core.ClosedJaxpr,
    arguments: Iterable[Value],
    apply: Callable[[core.JaxprEqn, list[Value]], Iterable[Value]],
    *,
    constant: Callable[[Any], Value],
) -> list[Value]:
    """Return the results of a program, of values of any kind.

    Args:
      closed: The program.
      arguments: Values of its inputs.
      apply: Returns the results of an equation for its operands. It runs in the context
        (precision, types), source line and name scope of the equation.
      constant: Returns the value of a constant or a literal.

    >>> closed = jax.make_jaxpr(lambda x: jnp.sin(x) * 2.0)(1.0)
    >>> names = lambda eqn, operands: [f"{eqn.primitive}({', '.join(operands)})"]
    >>> evaluate(closed, ["x"], names, constant=str)
    ['mul(sin(x), 2.0)']
    """
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, map(constant, closed.consts), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: core.Var | core.Literal) -> Value:
        return constant(atom.val) if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        source = eqn.source_info
        stack = source_info_util.current_name_stack() + source.name_stack
        with (
            source_info_util.user_context(source.traceback, name_stack=stack),
            eqn.ctx.manager,
        ):
            outs = apply(eqn, list(map(read, eqn.invars)))
        values.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def bind(eqn: core.JaxprEqn, operands: Sequence[Any], **replaced: Any) -> list[Any]:
    """Run the primitive of an equation on `operands`, some parameters replaced."""
    params = eqn.primitive.get_bind_params(eqn.params | replaced)
    outs = eqn.primitive.bind(*operands, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def held_program(eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """Return the one program that `CALLS` and `REMAT` run on their operands."""
    if eqn.primitive.name not in CALLS | REMAT:
        return None
    held = [
        value if isinstance(value, core.ClosedJaxpr) else core.ClosedJaxpr(value, ())
        for value in eqn.params.values()
        if isinstance(value, (core.ClosedJaxpr, core.Jaxpr))
    ]
    fits = len(held) == 1 and len(held[0].jaxpr.invars) == len(eqn.invars)
    return (
        held[0] if fits and not held[0].jaxpr.constvars[len(held[0].consts) :] else None
    )
