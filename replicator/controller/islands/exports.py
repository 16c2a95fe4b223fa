"""Computations as data, for islands in other processes.

A computation travels as `jax.export` has it: StableHLO, which is compiled again there,
and takes no code of Python along. One that calls back into Python cannot: it goes as a
recipe, its equations pickled, over the pipe from the process that started the island.
"""

import functools
import importlib
import re
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh

from replicator.base.types import Device
from replicator.controller.islands.protocol import Computation
from replicator.controller.islands.running.host_run import HostRun
from replicator.controller.islands.wire import layout_data, layout_from
from replicator.distributed.child import pickled, unpickled
from replicator.engine.analysis.evaluator import CALLS, bind, evaluate, held_program
from replicator.errors import ArgumentError

_CUSTOM_CALL = re.compile(r"custom_call\s+@([\w.]+)|call_target_name = \"([^\"]*)\"")


class NotExportableError(Exception):
    """A computation cannot be exported; its text says why."""


def exported(
    computation: Computation, devices: Sequence[Device], platform: str
) -> bytes:
    """Return a computation as `jax.export` has it.

    Args:
      computation: The computation.
      devices: As many as its slice has; those of another client will do.
      platform: What it is compiled for there.

    Raises:
      NotExportableError: It calls back into Python, or holds what has no export.
    """
    if computation.is_host:
        raise NotExportableError("it is a function of the host")
    shapes = [
        jax.ShapeDtypeStruct(
            shape.shape,
            shape.dtype,
            weak_type=shape.weak_type,
            sharding=None if layout is None else layout.sharding(devices),
        )
        for shape, layout in zip(computation.shapes, computation.inputs, strict=True)
    ]
    try:
        jitted = jax.jit(computation.run)
        found = jax.export.export(jitted, platforms=(platform,))(*shapes)
        return bytes(found.serialize())
    except (NotImplementedError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise NotExportableError(reason) from error


def function_of_export(data: bytes) -> tuple[Callable[..., Any], list[Any]]:
    """Return the function of an export, and the shapes of its arguments.

    Raises:
      ArgumentError: It is no export, or calls what lies in the memory of its maker.
    """
    try:
        found = jax.export.deserialize(bytearray(data))
        text = found.mlir_module()
    except Exception as error:  # of any kind, by what is in the bytes
        raise ArgumentError(
            "`program` must be the bytes of `jax.export`, got others "
            f"({type(error).__name__}). Send what `Exported.serialize` returns."
        ) from error
    for names in _CUSTOM_CALL.findall(text):
        name = "".join(names)
        if "callback" in name:
            raise ArgumentError(
                f"`program` must not call back into Python, got a call of {name!r}. "
                "Run it on an island that `controller.start` made."
            )
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in found.in_avals]
    return found.call, shapes


def recipe_of(computation: Computation) -> bytes:
    """Return the equations of a computation, pickled: for a child of this process.

    Raises:
      NotExportableError: It holds what cannot be pickled.
    """
    try:
        if computation.is_host:
            return pickled(computation.run)
        closed = jax.make_jaxpr(computation.run)(*computation.shapes)
        # Rules of derivatives, which nothing needs any more, hold what does not pickle.
        opened = jax.make_jaxpr(lambda *values: _opened(closed, values))
        return pickled(opened(*computation.shapes), _reduced)
    except Exception as error:
        raise NotExportableError(f"{type(error).__name__}: {error}") from error


def function_of_recipe(data: bytes) -> tuple[Callable[..., Any], list[Any]]:
    """Return the function of a recipe that the parent sent, and its shapes."""
    closed: core.ClosedJaxpr | HostRun = unpickled(data)
    if isinstance(closed, HostRun):
        return closed, []
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in closed.in_avals
    ]
    return core.jaxpr_as_fun(closed), shapes


def computation_data(computation: Computation) -> dict[str, Any]:
    """Return all of a computation but its function, as data."""
    return {
        "name": computation.name,
        "line": computation.line,
        "places": list(computation.places),
        "inputs": [layout_data(each) for each in computation.inputs],
        "outputs": [layout_data(each) for each in computation.outputs],
        "donated": list(computation.donated),
        "is_host": computation.is_host,
    }


def computation_from(
    data: dict[str, Any], run: Callable[..., Any], shapes: Sequence[Any]
) -> Computation:
    """Return the computation of data and a function."""
    return Computation(
        name=str(data["name"]),
        line=str(data["line"]),
        places=tuple(map(int, data["places"])),
        run=run,
        shapes=shapes,
        inputs=[layout_from(each) for each in data["inputs"]],
        outputs=[layout_from(each) for each in data["outputs"]],
        donated=tuple(map(int, data["donated"])),
        is_host=bool(data["is_host"]),
    )


def _opened(closed: core.ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    def apply(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
        held = held_program(eqn) if eqn.primitive.name in CALLS else None
        return bind(eqn, operands) if held is None else _opened(held, operands)

    return evaluate(closed, values, apply, constant=lambda value: value)


def _reduced(part: Any) -> Any:
    """Return how a part of a jaxpr is pickled: primitives by where they are found."""
    if isinstance(part, core.Primitive):
        return _attribute, _place_of(part)
    # Made of the context it is in; the mesh of `shard_map` is what matters of it.
    if type(part).__name__ == "JaxprEqnContext":
        return _context, (type(part), part.cur_abstract_mesh)
    # JAX's own subclass of a literal loses its type when it is pickled.
    if isinstance(part, np.ndarray) and type(part) is not np.ndarray:
        return np.asarray, (np.array(part),)
    # Where an equation comes from, in this process.
    if isinstance(part, weakref.ref) or type(part).__name__ == "Traceback":
        return types.NoneType, ()
    return NotImplemented


def _context(kind: Callable[[], Any], mesh: AbstractMesh) -> Any:
    with jax.sharding.use_abstract_mesh(mesh):
        return kind()


@functools.cache
def _place_of(primitive: core.Primitive) -> tuple[str, str]:
    for name, module in list(sys.modules.items()):
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is primitive:
                return name, attribute
    raise TypeError(f"primitive {primitive} is in no module")


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
