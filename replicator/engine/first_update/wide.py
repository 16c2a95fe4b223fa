"""Run a traced program in wider floats: what is rounding shows as the difference.

Floats of fewer than 32 bits become float32, and every product is of the highest
precision. Keys, integers and random bits stay. What cannot be widened (a kernel, a cast
of bits) is done as it was, between casts.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from replicator.engine.analysis.dataflow import sub_jaxprs

_INLINED = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    }
)


def narrowest(jaxpr: core.Jaxpr, *, on_cpu: bool) -> float:
    """Return the coarsest rounding below that of float32 in a program; 0 for none.

    Args:
      jaxpr: Of the program.
      on_cpu: Whether it runs where products of float32 are of float32.
    """
    coarse = float(jnp.finfo(jnp.bfloat16).eps)
    return min(coarse, max(_roundings(jaxpr), default=0.0)) if on_cpu else coarse


def _roundings(jaxpr: core.Jaxpr) -> Iterator[float]:
    for eqn in jaxpr.eqns:
        for atom in (*eqn.invars, *eqn.outvars):
            if _is_narrow(dtype := _dtype(atom)):
                yield float(jnp.finfo(dtype).eps)
        for sub in sub_jaxprs(eqn):
            yield from _roundings(sub)


def widened(closed: core.ClosedJaxpr) -> Callable[..., list]:
    """Return the function of a program's inputs in wider floats; results as they were.

    That a result is kept in fewer bits is no difference to be measured.
    """

    wanted = [_dtype(atom) for atom in closed.jaxpr.outvars]

    def run(*inputs: Any) -> list:
        with jax.default_matmul_precision("highest"):
            found = _run(closed.jaxpr, closed.consts, inputs)
        return [
            value.astype(dtype) if _is_narrow(dtype) else value
            for value, dtype in zip(found, wanted, strict=True)
        ]

    return run


def _run(jaxpr: core.Jaxpr, consts: Sequence, inputs: Sequence) -> list:
    values: dict[core.Var, Any] = {}

    def read(atom: core.Var | core.Literal) -> Any:
        found = atom.val if isinstance(atom, core.Literal) else values[atom]
        return _wide(found)

    values.update(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        outs = _done(eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _done(eqn: core.JaxprEqn, inputs: list) -> Sequence:
    name, params = eqn.primitive.name, dict(eqn.params)
    if name == "reduce_precision":
        return inputs
    for value in params.values() if name in _INLINED else ():
        body, consts = _opened(value)
        if body is not None:
            return _run(body, consts, inputs)
    wide = {name: _wide_param(value) for name, value in params.items()}
    if "precision" in wide:
        wide["precision"] = (jax.lax.Precision.HIGHEST,) * 2
    try:
        if name == "bitcast_convert_type":
            raise TypeError("bits of another width")
        return _bound(eqn, inputs, wide)
    except Exception:  # as it was: it takes what it took before
        was = [
            x.astype(dtype) if _is_narrow(dtype) else x
            for x, dtype in zip(inputs, map(_dtype, eqn.invars), strict=True)
        ]
        return _bound(eqn, was, params)


def _bound(eqn: core.JaxprEqn, inputs: list, params: dict) -> Sequence:
    with eqn.ctx.manager:
        params = eqn.primitive.get_bind_params(params)
        found = eqn.primitive.bind(*inputs, **params)
    return found if eqn.primitive.multiple_results else [found]


def _wide_param(value: Any) -> Any:
    jaxpr, consts = _opened(value)
    if jaxpr is not None:
        shapes = [_wide_shape(var.aval) for var in jaxpr.invars]
        made = jax.make_jaxpr(lambda *xs: _run(jaxpr, consts, xs))(*shapes)
        return made if isinstance(value, core.ClosedJaxpr) else made.jaxpr
    if type(value) is tuple:
        return tuple(map(_wide_param, value))
    if isinstance(value, np.dtype) and _is_narrow(value):
        return np.dtype(np.float32)
    return value


def _opened(value: Any) -> tuple[core.Jaxpr | None, Sequence]:
    if isinstance(value, core.ClosedJaxpr):
        return value.jaxpr, value.consts
    return (value, ()) if isinstance(value, core.Jaxpr) else (None, ())


def _wide(value: Any) -> Any:
    narrow = _is_narrow(getattr(value, "dtype", None))
    return value.astype(np.float32) if narrow else value


def _wide_shape(aval: Any) -> jax.ShapeDtypeStruct:
    dtype = np.dtype(np.float32) if _is_narrow(aval.dtype) else aval.dtype
    return jax.ShapeDtypeStruct(aval.shape, dtype)


def _dtype(atom: core.Var | core.Literal) -> Any:
    return getattr(atom.aval, "dtype", None)


def _is_narrow(dtype: Any) -> bool:
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return np.dtype(dtype).itemsize < 4
