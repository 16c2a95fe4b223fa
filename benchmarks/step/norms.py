"""Batch norms to be compared, and the one step that each is lifted into."""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.nnx import BatchNorm, params_of, with_params

OURS, FLAX, AGAIN, FAST = "replicator", "flax", "flax again", "flax fast"
_TOLERANCE = 1e-4


def make_norms(features: int) -> dict[str, nnx.Module]:
    """Return the norms by name; scales and biases are drawn, and equal."""
    same = {
        "momentum": 0.9,
        "scale_init": nnx.initializers.normal(1.0),
        "bias_init": nnx.initializers.normal(1.0),
    }

    def theirs(*, fast: bool) -> nnx.Module:
        return nnx.BatchNorm(
            features,
            axis_name="replica",
            use_fast_variance=fast,
            rngs=nnx.Rngs(0),
            **same,
        )

    return {
        OURS: BatchNorm(features, rngs=nnx.Rngs(0), **same),
        FLAX: theirs(fast=False),
        AGAIN: theirs(fast=False),
        FAST: theirs(fast=True),
    }


def make_batch(shape: tuple[int, ...], mesh: Mesh) -> PyTree:
    """Return inputs with a mean beside 0, and the weights of the outputs' sum."""
    x, weight = jax.random.normal(jax.random.key(0), (2, len(mesh.devices), *shape))
    by_replica = NamedSharding(mesh, PartitionSpec("replica"))
    batch = {"x": 0.5 + x, "weight": weight}
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *shape[1:]), batch)
    return jax.device_put(flat, by_replica)


def step_over(mesh: Mesh) -> Any:
    """Return the jitted `step(norm, batch) -> (moved norm, outputs and gradients)`."""

    def step_fn(norm: nnx.Module, batch: PyTree) -> tuple[nnx.Module, PyTree]:
        def loss_fn(params: PyTree, x: jax.Array) -> tuple[jax.Array, PyTree]:
            moved = with_params(norm, params)
            y = moved(x)  # pyright: ignore[reportCallIssue]
            return (batch["weight"] * y).sum(), (y, moved)

        grad_fn = jax.grad(loss_fn, argnums=(0, 1), has_aux=True)
        (of_params, of_x), (y, moved) = grad_fn(params_of(norm), batch["x"])
        of_params = jax.tree.map(lambda leaf: leaf[None], of_params)
        return moved, {"y": y, "of_x": of_x, **of_params}

    whole, cut = PartitionSpec(), PartitionSpec("replica")
    return jax.jit(
        jax.shard_map(
            step_fn,
            mesh=mesh,
            in_specs=(whole, cut),
            out_specs=(whole, cut),
            check_vma=False,
        )
    )


def require_equal(
    found: tuple[nnx.Module, PyTree], expected: tuple[nnx.Module, PyTree], name: str
) -> None:
    """Raise unless arrays differ by at most 1e-4 of the largest number in each.

    Raises:
      ValueError: It names the array that differs.
    """
    flat = [
        dict(named_leaves((nnx.to_pure_dict(nnx.state(norm)), results)))
        for norm, results in (found, expected)
    ]
    assert flat[0].keys() == flat[1].keys()
    for path, leaf in flat[0].items():
        other = np.asarray(flat[1][path])
        error, largest = np.abs(np.asarray(leaf) - other).max(), np.abs(other).max()
        if not error <= _TOLERANCE * largest:
            raise ValueError(
                f"`{path}` of {name} must be that of {FLAX}, got {error:.1e} beside "
                f"{largest:.1e}. Do not compare their times."
            )
