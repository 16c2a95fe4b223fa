"""Run a traced program in wider floats: the difference is rounding.

Floats of fewer than 32 bits become float32, and every product is of the highest
precision. Keys, integers and random bits stay. An equation that cannot be widened (a
kernel, a cast of bits) is done as it was, between casts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from replicator.engine.analysis.dataflow import equations
from replicator.engine.analysis.evaluator import bind, evaluate, held_program

_HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def narrowest(jaxpr: core.Jaxpr, *, on_cpu: bool) -> float:
    """Return the coarsest rounding below that of float32 in a program; 0 for none.

    Args:
      jaxpr: The program.
      on_cpu: Whether it runs on a CPU, where products of float32 are in float32.

    >>> narrowest(jax.make_jaxpr(jnp.sin)(jnp.float32(1.0)).jaxpr, on_cpu=True)
    0.0
    """
    coarse = float(jnp.finfo(jnp.bfloat16).eps)
    if not on_cpu:
        return coarse
    atoms = (x for eqn in equations(jaxpr) for x in (*eqn.invars, *eqn.outvars))
    narrow = filter(_is_narrow, map(_dtype, atoms))
    return min(coarse, max((float(jnp.finfo(x).eps) for x in narrow), default=0.0))


def widened(closed: core.ClosedJaxpr) -> Callable[..., list]:
    """Return a program in wider floats, with results in their own floats.

    The rounding of a result to fewer bits is not a difference to be measured.
    """
    wanted = [_dtype(atom) for atom in closed.jaxpr.outvars]

    def run(*inputs: Any) -> list:
        with jax.default_matmul_precision("highest"):
            return _as(wanted, _run(closed, inputs))

    return run


def _run(closed: core.ClosedJaxpr, inputs: Sequence) -> list:
    return evaluate(closed, map(_wide, inputs), _done, constant=_wide)


def _wide(value: Any) -> Any:
    is_narrow = _is_narrow(getattr(value, "dtype", None))
    return value.astype(np.float32) if is_narrow else value


def _done(eqn: core.JaxprEqn, inputs: list) -> list:
    name = eqn.primitive.name
    if name == "reduce_precision":
        return inputs
    if (held := held_program(eqn)) is not None:
        return _run(held, inputs)
    if name != "bitcast_convert_type":
        wide = {name: _wide_param(value) for name, value in eqn.params.items()}
        if "precision" in wide:
            wide["precision"] = _HIGHEST
        try:
            return list(map(_wide, bind(eqn, inputs, **wide)))
        except (TypeError, ValueError, NotImplementedError):
            pass  # it takes only its own floats
    return list(map(_wide, bind(eqn, _as(map(_dtype, eqn.invars), inputs))))


def _wide_param(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_wide_param, value))
    if isinstance(value, core.ClosedJaxpr):
        avals: list[Any] = value.in_avals
        wide = [jax.ShapeDtypeStruct(a.shape, _wide_param(a.dtype)) for a in avals]
        return jax.make_jaxpr(lambda *xs: _run(value, xs))(*wide)
    if isinstance(value, core.Jaxpr):  # from jax 0.12 on all of them are closed
        return _wide_param(core.ClosedJaxpr(value, ())).jaxpr
    is_narrow = isinstance(value, np.dtype) and _is_narrow(value)
    return np.dtype(np.float32) if is_narrow else value


def _as(dtypes: Any, values: Sequence) -> list:
    pairs = zip(values, dtypes, strict=True)
    return [x.astype(dtype) if _is_narrow(dtype) else x for x, dtype in pairs]


def _dtype(atom: core.Var | core.Literal) -> Any:
    return getattr(atom.aval, "dtype", None)


def _is_narrow(dtype: Any) -> bool:
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return is_float and np.dtype(dtype).itemsize < 4
