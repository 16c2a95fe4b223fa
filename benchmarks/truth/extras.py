"""State of one's own that follows from the parameters, and moves once per update."""

import jax
import jax.numpy as jnp

import replicator
from benchmarks.truth.supervised import Extra


def _averaged(old, new, decay: float):
    return jax.tree.map(lambda o, n: decay * o + (1 - decay) * n, old, new)


def _copy(params):
    return jax.tree.map(lambda leaf: leaf + 0, params)


our_ema = replicator.ema(0.9)
ema = Extra(
    init=_copy,
    ours=lambda old, params: our_ema.update(params, old),
    oracle=lambda old, params: _averaged(old, params, 0.9),
)
polyak = Extra(
    init=_copy,
    ours=lambda old, params: _averaged(old, params, 0.95),
    oracle=lambda old, params: _averaged(old, params, 0.95),
)
counter = Extra(
    init=lambda params: jnp.zeros((), jnp.int32),
    ours=lambda old, params: old + 1,
    oracle=lambda old, params: old + 1,
)
gated_counter = Extra(
    init=lambda params: jnp.zeros((), jnp.int32),
    ours=lambda old, params: old + replicator.is_last_microbatch().astype(jnp.int32),
    oracle=lambda old, params: old + 1,
)


def _copied(old, params):
    """Copy the parameters every second update."""
    count = old["count"] + 1
    held = jax.tree.map(
        lambda o, n: jnp.where(count % 2 == 0, n, o), old["params"], params
    )
    return {"count": count, "params": held}


periodic = Extra(
    init=lambda params: {"count": jnp.zeros((), jnp.int32), "params": _copy(params)},
    ours=_copied,
    oracle=_copied,
)


def _halved(old, params):
    """Walk a random key of one's own, and a rate that decays."""
    key = jax.random.fold_in(jax.random.wrap_key_data(old["key"]), 1)
    return {"key": jax.random.key_data(key), "rate": old["rate"] * 0.5}


walking = Extra(
    init=lambda params: {
        "key": jax.random.key_data(jax.random.key(3)),
        "rate": jnp.ones(()),
    },
    ours=_halved,
    oracle=_halved,
)
