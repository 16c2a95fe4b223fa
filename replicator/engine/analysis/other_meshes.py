"""Refuse a function that brings a mesh of its own, with a remedy.

The layout's mesh is the only one of its programs. JAX finds another one deep inside of
a trace, with errors that only help an author of `shard_map`. These errors are known by
their text; others pass as they are.
"""

import contextlib
from collections.abc import Iterator

from jax.extend import core

from replicator.engine.analysis import dataflow
from replicator.errors import ArgumentError, ReplicatorError

# Errors of JAX 0.10 to 0.12 for an array on another mesh,
_ARRAY = (
    "Closing over inputs to shard_map",
    "Mesh for all inputs should be equal",
    "should match the mesh of sharding",
    "should match the aval mesh",
    "is not equal to the size of the mesh",
    "out sharding could not be resolved",
)
# for a constraint that names axes of the mesh in context,
_AXES = (
    "is not found in mesh",
    "can only refer to Auto axes of the mesh",
    "contains a manual axes",
)
# and for one that names another mesh, or needs one where none is set.
_CONSTRAINT = (
    *_AXES,
    "requires a non-empty mesh in context",
    "is incompatible with mesh_shape",
    "should match the mesh passed to shard_map",
)
_PMAP = ("_internal_pmap_axis_name",)
_VARIABLE = ("mesh context or metadata is required",)  # flax NNX

_REFUSALS = (
    (
        _PMAP,
        "be what one replica does, got a call of `jax.pmap` in it. Use `jax.vmap`, or "
        "leave it out: the step runs on all devices.",
    ),
    (
        _VARIABLE,
        "make variables that are not placed on a mesh, got one of flax NNX that names "
        "axes. Make the module under `with nnx.use_eager_sharding(False):`, and place "
        "its variables by the rules of a strategy.",
    ),
    (
        _ARRAY,
        "compute with arrays that lie on no other mesh, got one that does. Close over "
        "`jax.device_get(array)`, or put it into the state.",
    ),
    (
        _CONSTRAINT,
        "leave it to the strategy where arrays lie, got a constraint that names a mesh "
        "or its axes. Leave it out (of a box of flax, its `mesh`), and write a rule of "
        "a strategy.",
    ),
)


@contextlib.contextmanager
def other_meshes_refused(name: str) -> Iterator[None]:
    """Refuse the function `name` if its trace meets another mesh.

    Raises:
      ArgumentError: It does.
    """
    try:
        yield
    except ReplicatorError:
        raise
    except Exception as failure:
        for texts, refusal in _REFUSALS:
            if _has_any(failure, texts):
                raise ArgumentError(f"`{name}` must {refusal}").with_traceback(
                    failure.__traceback__
                ) from None
        raise


def refuse_other_meshes(jaxpr: core.Jaxpr, axis_names: tuple[str, ...]) -> None:
    """Refuse a step of one replica that constrains arrays to another mesh.

    Raises:
      ArgumentError: It does: JAX would end in an assertion.
    """

    def is_other(eqn: core.JaxprEqn) -> bool:
        mesh = getattr(eqn.params.get("sharding"), "mesh", None)
        if eqn.primitive.name != "sharding_constraint" or mesh is None:
            return False
        return mesh.axis_names != axis_names

    if dataflow.find_equation(jaxpr, is_other) is not None:
        raise ArgumentError(f"`step_fn` must {_REFUSALS[-1][1]}")


def names_axes(failure: Exception) -> bool:
    """Return whether JAX refused names of axes that the mesh in context has not."""
    return _has_any(failure, _AXES)


def _has_any(failure: Exception, texts: tuple[str, ...]) -> bool:
    return any(each in str(failure) for each in texts)
