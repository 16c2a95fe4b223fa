"""The re-emitted step has the collectives and the memory of one written by hand."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from replicator import Replicator, strategies
from tests.steps import lenient

WIDTH, LAYERS = 256, 4
tx = lenient(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
batch = {"x": np.ones((64, WIDTH), np.float32)}


def params_of(which):
    layer = jnp.ones((WIDTH, WIDTH)) / WIDTH
    if which == "mlp":
        return {f"w{n}": layer for n in range(LAYERS)}
    return {"w": jnp.stack([layer] * LAYERS)}


def trainer(which, use=lambda w: w):
    """Return plain functions; `use` is what is written by hand at each weight."""

    def layer(x, w):
        return jnp.tanh(x @ use(w)), None

    def loss_fn(params, x):
        y = x
        if which == "mlp":
            for w in params.values():
                y, _ = layer(y, w)
        else:
            body = jax.checkpoint(layer) if which == "remat" else layer
            y, _ = jax.lax.scan(body, x, params["w"])
        return jnp.square(y - x).mean()

    def init_fn(key):
        params = params_of(which)
        return {"params": params, "opt": tx.init(params)}

    def step_fn(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch["x"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    return init_fn, step_fn


def compiled(which):
    rep = Replicator(strategy=strategies.fsdp(), compilation_cache=False)
    init_fn, step_fn = trainer(which)
    return rep.compile(step_fn).lower(rep.init(init_fn), batch).compile()


def compiled_by_hand(which):
    rep = Replicator(strategy=strategies.fsdp(), compilation_cache=False)

    def lie(leaf, *axes):
        where = NamedSharding(rep.mesh, PartitionSpec(*axes))
        return jax.lax.with_sharding_constraint(leaf, where)

    @jax.custom_vjp
    def use(w):
        return lie(w)

    use.defvjp(lambda w: (lie(w), None), lambda _, ct: (lie(ct, "shard"),))
    init_fn, step_fn = trainer(which, use)
    state = rep.init(init_fn)
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    rows = NamedSharding(rep.mesh, PartitionSpec("shard"))
    program = jax.jit(
        step_fn,
        in_shardings=(where, {"x": rows}),
        out_shardings=(where, None),
        donate_argnums=0,
    )
    return program.lower(state, batch).compile()


def sizes_on_the_wire(program):
    """Return the elements of arrays in collectives, by kind."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = collections.Counter()
    pattern = rf"= \(?([^=]*?)\)? ({kinds})(?:-start)?\("
    for shapes, kind in re.findall(pattern, program.as_text()):
        for shape in re.findall(r"\w+\[([\d,]+)\]", shapes):
            found[kind] += int(np.prod([int(size) for size in shape.split(",")]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("which", ["mlp", "scan", "remat"])
def test_a_step_costs_what_it_costs_by_hand(which):
    ours, by_hand = compiled(which), compiled_by_hand(which)
    temporaries = [
        each.memory_analysis().temp_size_in_bytes for each in (ours, by_hand)
    ]

    assert temporaries[0] <= 1.1 * temporaries[1]
    assert sizes_on_the_wire(ours)["all-gather"] >= WIDTH * WIDTH
    wire, expected = sizes_on_the_wire(ours), sizes_on_the_wire(by_hand)
    if which == "scan":
        # By hand the loop keeps all whole weights for its way back; ours gathers anew.
        assert wire.pop("all-gather") == 2 * expected.pop("all-gather")
        assert temporaries[0] < temporaries[1]
    assert wire == expected
