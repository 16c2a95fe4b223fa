"""Computations that call back into Python, as recipes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from replicator.controller.islands.exports import (
    NotExportableError,
    exported,
    function_of_recipe,
    recipe_of,
)
from replicator.controller.islands.protocol import Computation
from replicator.controller.layouts import SliceLayout

ONES = np.ones(2, np.float32)
MESH = AbstractMesh((2,), ("devices",), axis_types=(AxisType.Auto,))


def call(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.asarray, shape, x, vmap_method="sequential")


@jax.custom_vjp
def ruled(x):
    return call(x)


ruled.defvjp(lambda x: (call(x), x), lambda kept, given: (call(kept) * given,))


def printed(x):
    jax.debug.print("{}", x)
    return jax.nn.relu(x).sum() * 2.0


def summed(x):
    return jax.lax.psum(call(x), "devices")


CASES = {
    "shard_map": jax.shard_map(summed, mesh=MESH, in_specs=P("devices"), out_specs=P()),
    "gradient": jax.grad(printed),
    "custom rule": jax.grad(lambda x: (ruled(x) ** 2).sum()),
    "scan": lambda x: jax.lax.scan(lambda c, _: (call(c), c.sum()), x, None, length=3),
    "vmap": jax.vmap(call),
    "random numbers": lambda x: call(x) + jax.random.normal(jax.random.key(0), (2,)),
}


def computation(function):
    return Computation(
        name="op",
        line="",
        places=(0, 1),
        run=lambda x: jax.tree.leaves(function(x)),
        shapes=[jax.ShapeDtypeStruct((2,), np.float32)],
        inputs=[SliceLayout(axes=(("devices", 2),))],
        outputs=[None],
    )


@pytest.mark.parametrize("case", CASES)
def test_a_recipe_computes_what_its_computation_does(case):
    there, shapes = function_of_recipe(recipe_of(computation(CASES[case])))
    whole = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("devices",)), P())
    run = jax.jit(there, in_shardings=whole)
    wanted = jax.jit(computation(CASES[case]).run, in_shardings=whole)
    assert [shape.shape for shape in shapes] == [(2,)]
    for one, other in zip(run(ONES), wanted(ONES), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_calls_back_is_not_exported():
    with pytest.raises(NotExportableError):
        exported(computation(call), jax.devices()[:2], "cpu")
    assert exported(computation(jnp.sin), jax.devices()[:2], "cpu")
