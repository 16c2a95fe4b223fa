"""Programs in which another mesh is set, and boxes of flax linen that name its axes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import AxisType

from benchmarks.truth import optimizers
from benchmarks.truth.law import cut_by
from benchmarks.truth.program import Program, pair
from benchmarks.truth.programs_modules import batch_of, train_state
from benchmarks.truth.tasks import FEATURES
from replicator import strategies


def _in_mesh(axis_type: AxisType):
    """Set a mesh as programs of today do, of other axes than any of ours."""
    return jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), (axis_type,) * 2))


def _linen(name: str, tx, names: tuple[str, str], **options: Any) -> Program:
    """Train boxes of linen that name axes; where no mesh is set they only hold."""
    boxed = nn.with_partitioning(nn.initializers.constant(0.3), names)
    layer = nn.Dense(1, kernel_init=boxed, param_dtype=jnp.float64)

    def make(wrap):
        optimizer = wrap(tx())

        def init(key):
            params = layer.init(key, jnp.ones((1, FEATURES)))
            return {"params": params, "opt": optimizer.init(params)}

        def step(state, batch):
            def loss_fn(params):
                y = layer.apply(params, batch["x"])
                return ((jnp.asarray(y)[:, 0] - batch["y"]) ** 2).mean()

            loss, grads = jax.value_and_grad(loss_fn)(state["params"])
            updates, opt = optimizer.update(grads, state["opt"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt": opt}, {"loss": loss}

        return init, step

    return Program(
        name=name,
        batch=batch_of,
        **pair(make, lambda step: step, lambda setting, step: cut_by(())(step)),
        **options,
    )


FSDP = {"strategy": strategies.fsdp(whole_below_bytes=0)}
EXPLICIT = functools.partial(_in_mesh, AxisType.Explicit)

PROGRAMS = [
    _linen("linen-boxes", optimizers.adam, ("embed", "mlp")),
    _linen(
        "linen-boxes-mesh-explicit",
        optimizers.momentum,
        ("data", "model"),
        around=EXPLICIT,
    ),
    _linen(
        "linen-boxes-mesh-auto-fsdp",
        optimizers.adam,
        ("model", "shard"),
        around=functools.partial(_in_mesh, AxisType.Auto),
        options=FSDP,
    ),
    dataclasses.replace(
        train_state("train-state-mesh-explicit", optimizers.adam, None),
        around=EXPLICIT,
    ),
    dataclasses.replace(
        train_state("train-state-mesh-explicit-fsdp", optimizers.adam, None),
        around=EXPLICIT,
        options=FSDP,
    ),
]
