"""A mixture of experts, as for one device and with its placement written by hand.

Fedus et al. 2021, "Switch Transformers", §2.2: each token goes to one expert, within
the capacity of its sequence. Rows are added into zeros on their way there, and, for
their gradients, on the way back from there and from the table: along the batch, which
is cut, so that no device needs another's.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from benchmarks.step.placed_step import jitted, use_placed
from benchmarks.tasks import Task, of_plain_params
from replicator.base.types import Key, PyTree

EXPERTS = 8


def mixture(
    global_batch: int, *, vocabulary: int = 256, width: int = 128, context: int = 32
) -> Task:
    """Return a table, one layer of experts and the table again, in plain dicts.

    Args:
      global_batch: Sequences.
      vocabulary: Number of different tokens.
      width: Features of a token; experts have four times as many.
      context: Tokens of a sequence that are learned from.
    """
    shapes = {
        "table": (vocabulary, width),
        "router": (width, EXPERTS),
        "up": (EXPERTS, width, 4 * width),
        "down": (EXPERTS, 4 * width, width),
    }

    def init_model(key: Key) -> PyTree:
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.normal(each, shape) * shape[-2] ** -0.5
            for each, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    shape = (global_batch, context + 1)
    tokens = np.random.default_rng(0).integers(0, vocabulary, shape, np.int32)
    return Task(
        init_model=init_model,
        value_and_grad=of_plain_params(_loss),
        params_of=lambda params: params,
        with_params=lambda _, params: params,
        batch={"tokens": tokens},
    )


def placed_mixture(
    task: Task, tx: optax.GradientTransformation, shardings: PyTree
) -> jax.stages.Wrapped:
    """Return the step as an expert writes it: weights are whole where they are used.

    Args:
      task: Of `mixture`.
      tx: The optimizer.
      shardings: Of the state, a leaf each.
    """

    def loss_fn(params: PyTree, batch: PyTree) -> Array:
        use = functools.partial(use_placed, "whole")
        return _loss(jax.tree.map(use, params, shardings["model"]), batch)

    by_hand = dataclasses.replace(task, value_and_grad=of_plain_params(loss_fn))
    return jitted(by_hand, tx, shardings)


def _loss(params: PyTree, batch: PyTree) -> Array:
    tokens = batch["tokens"]
    x = params["table"][tokens[:, :-1]]
    logits = x @ params["router"]
    expert = jnp.argmax(logits, -1)
    gate = jnp.take_along_axis(jax.nn.softmax(logits), expert[..., None], -1)
    capacity = 2 * x.shape[1] // EXPERTS
    taken = jnp.cumsum(jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32), 1)
    slot = jnp.take_along_axis(taken, expert[..., None], -1)[..., 0] - 1
    empty = jnp.zeros((EXPERTS, capacity, x.shape[-1]), x.dtype)
    # Of a sequence whose expert is full the last tokens go by: they are dropped.
    rooms = jax.vmap(lambda e, s, x: empty.at[e, s].add(x, mode="drop"))(
        expert, slot, x
    )
    hidden = jax.nn.relu(jnp.einsum("becd,edh->bech", rooms, params["up"]))
    made = jnp.einsum("bech,ehd->becd", hidden, params["down"])
    back = jax.vmap(lambda m, e, s: m.at[e, s].get(mode="fill", fill_value=0))(
        made, expert, slot
    )
    x = x + gate * back
    log_probs = jax.nn.log_softmax(x @ params["table"].T)
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean()
