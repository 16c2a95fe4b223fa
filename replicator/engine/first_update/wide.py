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
from replicator.engine.sharding_constraints.targets import CALLS, REMAT

_HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


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
        for dtype in map(_dtype, (*eqn.invars, *eqn.outvars)):
            if _is_narrow(dtype):
                yield float(jnp.finfo(dtype).eps)
        for sub in sub_jaxprs(eqn):
            yield from _roundings(sub)


def widened(closed: core.ClosedJaxpr) -> Callable[..., list]:
    """Return a program in wider floats, with results in the floats that they have.

    That a result is kept in fewer bits is no difference to be measured.
    """
    wanted = [_dtype(atom) for atom in closed.jaxpr.outvars]

    def run(*inputs: Any) -> list:
        with jax.default_matmul_precision("highest"):
            return _as(wanted, _run(closed.jaxpr, closed.consts, inputs))

    return run


def _run(jaxpr: core.Jaxpr, consts: Sequence, inputs: Sequence) -> list:
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: core.Var | core.Literal) -> Any:
        found = atom.val if isinstance(atom, core.Literal) else values[atom]
        return (
            found.astype(np.float32)
            if _is_narrow(getattr(found, "dtype", None))
            else found
        )

    for eqn in jaxpr.eqns:
        outs = _done(eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _done(eqn: core.JaxprEqn, inputs: list) -> Sequence:
    name, params = eqn.primitive.name, dict(eqn.params)
    if name == "reduce_precision":
        return inputs
    for value in params.values() if name in CALLS | REMAT else ():
        if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
            return _run(*_opened(value), inputs)
    if name != "bitcast_convert_type":
        wide = {name: _wide_param(value) for name, value in params.items()}
        if "precision" in wide:
            wide["precision"] = _HIGHEST
        try:
            return _bound(eqn, inputs, wide)
        except (TypeError, ValueError, NotImplementedError):
            pass  # as it was, then: it takes what it took before
    return _bound(eqn, _as(map(_dtype, eqn.invars), inputs), params)


def _bound(eqn: core.JaxprEqn, inputs: list, params: dict) -> Sequence:
    with eqn.ctx.manager:
        found = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
    return found if eqn.primitive.multiple_results else [found]


def _wide_param(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_wide_param, value))
    if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
        jaxpr, consts = _opened(value)
        avals: list[Any] = [var.aval for var in jaxpr.invars]
        wide = [jax.ShapeDtypeStruct(a.shape, _wide_param(a.dtype)) for a in avals]
        made = jax.make_jaxpr(lambda *xs: _run(jaxpr, consts, xs))(*wide)
        return made if isinstance(value, core.ClosedJaxpr) else made.jaxpr
    is_narrow = isinstance(value, np.dtype) and _is_narrow(value)
    return np.dtype(np.float32) if is_narrow else value


def _opened(value: core.ClosedJaxpr | core.Jaxpr) -> tuple[core.Jaxpr, Sequence]:
    is_closed = isinstance(value, core.ClosedJaxpr)
    return (value.jaxpr, value.consts) if is_closed else (value, ())


def _as(dtypes: Any, values: Sequence) -> list:
    pairs = zip(values, dtypes, strict=True)
    return [x.astype(dtype) if _is_narrow(dtype) else x for x, dtype in pairs]


def _dtype(atom: core.Var | core.Literal) -> Any:
    return getattr(atom.aval, "dtype", None)


def _is_narrow(dtype: Any) -> bool:
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return is_float and np.dtype(dtype).itemsize < 4
