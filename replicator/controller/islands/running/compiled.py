"""Compile a computation for the devices of its slice."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicator.base.types import Device
from replicator.controller.islands.protocol import Computation
from replicator.controller.layouts import SliceLayout, layout_of


def compiled_for(
    computation: Computation, devices: Sequence[Device]
) -> tuple[jax.stages.Compiled, list[SliceLayout]]:
    """Compile a computation; return it with the layouts of its outputs.

    Its first result is nobody's, so it can be waited for.
    """
    compiled = _compile(computation, devices, computation.outputs)
    found = [layout_of(each, len(devices)) for each in compiled.output_shardings]
    if None in found:  # a layout without a mesh, which nothing could be planned by
        whole = SliceLayout(axes=(("devices", len(devices)),))
        compiled = _compile(computation, devices, [each or whole for each in found])
        found = [each or whole for each in found]
    return compiled, [layout for layout in found[1:] if layout is not None]


def _compile(
    computation: Computation,
    devices: Sequence[Device],
    outputs: Sequence[SliceLayout | None],
) -> jax.stages.Compiled:
    def run(*arrays: jax.Array) -> list[Any]:
        # The first result is nobody's, so it can be waited for: others may be donated.
        return [jnp.zeros((), bool), *computation.run(*arrays)]

    run.__name__ = computation.name
    shardings = [None if each is None else each.sharding(devices) for each in outputs]
    if len(shardings) == len(computation.outputs):
        shardings = [None, *shardings]
    inputs = tuple(
        None if each is None else each.sharding(devices) for each in computation.inputs
    )
    if not inputs:
        whole = SliceLayout(axes=(("devices", len(devices)),)).sharding(devices)
        shardings = [each or whole for each in shardings]
    jitted = jax.jit(
        run,
        in_shardings=inputs,
        out_shardings=shardings,
        donate_argnums=computation.donated,
    )
    here = (
        each for each in devices if each.process_index == each.client.process_index()
    )
    with jax.default_device(next(here)):
        return jitted.lower(*computation.shapes).compile()
