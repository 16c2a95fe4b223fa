"""Models in which the examples of a microbatch meet, on whatever replica they are.

See `tasks` for what a task is. Padding has `world.weight` 0 and takes no part.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.truth.tasks import (
    CONV_WEIGHTS,
    FEATURES,
    WORDS,
    Task,
    convolved,
    cross_entropy,
    drop,
    images,
    vectors,
    weights,
    words,
)


def _ones(batch, world, rows):
    return jnp.ones(rows, batch.dtype) if world.weight is None else world.weight


def _normed_conv(params, batch, world):
    y, moments = world.norm(convolved(batch["x"], params["kernel"]), world.weight)
    y = jax.nn.gelu(y * params["scale"] + params["bias"])
    logits = y.mean((1, 2)) @ params["head"]
    return cross_entropy(logits, batch["label"]), {"moments": moments}


NORMED_WEIGHTS = {**CONV_WEIGHTS, "scale": np.full((1, 1, 1, 4), 1.3)}
FIRST_MOMENTS = {"mean": np.zeros(4, np.float32), "var": np.ones(4, np.float32)}
normed_conv = Task(
    name="conv-norm",
    params=NORMED_WEIGHTS,
    losses=_normed_conv,
    batch=images,
    meets=True,
    running=FIRST_MOMENTS,
)


def _normed_dropped(params, batch, world):
    y, moments = world.norm(batch["x"] @ params["w1"], world.weight)
    y = drop(jax.nn.gelu(y), world.keys)
    return (y @ params["w2"] - batch["y"]) ** 2, {"moments": moments}


normed_dropout = Task(
    name="norm-dropout",
    params=weights(20, w1=(FEATURES, 4), w2=(4,)),
    losses=_normed_dropped,
    batch=vectors,
    meets=True,
    running=FIRST_MOMENTS,
)


def _normed_tokens(params, batch, world):
    """Normalise whole sequences of examples, of which some are padding."""
    x = params["embed"][batch["word"][:, :-1]]
    y, moments = world.norm(x, world.weight)
    logits = jax.nn.gelu(y) @ params["out"]
    return cross_entropy(logits, batch["word"][:, 1:]), {"moments": moments}


normed_tokens = Task(
    name="token-norm",
    params=weights(21, embed=(WORDS, 4), out=(4, WORDS)),
    losses=_normed_tokens,
    batch=words,
    meets=True,
    running=FIRST_MOMENTS,
)


def _twice_normed(params, batch, world):
    """Take a gradient with respect to the inputs through a norm, and train on it."""

    def told(x):
        y, _ = world.norm(x @ params["w1"], world.weight)
        return jnp.tanh(y) @ params["w2"]

    out, back = jax.vjp(told, batch["x"])
    (slope,) = back(_ones(batch["x"], world, len(out)))
    return (out - batch["y"]) ** 2 + 0.1 * jnp.square(slope).sum(-1), {}


normed_penalty = Task(
    name="norm-gradient-penalty",
    params=weights(22, w1=(FEATURES, 4), w2=(4,)),
    losses=_twice_normed,
    batch=vectors,
    meets=True,
)


def _contrastive(params, batch, world):
    """Distinguish each example's second view from those of all others."""

    def project(x, w):
        y = jnp.tanh(x @ w)
        return y * lax.rsqrt(jnp.square(y).sum(-1, keepdims=True) + 1e-3)

    ours = project(batch["x"], params["one"])
    theirs, place = world.gather(project(batch["x"][:, ::-1], params["other"]))
    there, _ = world.gather(_ones(ours, world, len(ours)))
    logits = jnp.exp(params["scale"]) * ours @ theirs.T
    logits = jnp.where(there[None] > 0, logits, -1e30)
    return cross_entropy(logits, place + jnp.arange(len(ours))), {}


contrastive = Task(
    name="contrastive",
    params={
        **weights(23, one=(FEATURES, 4), other=(FEATURES, 4)),
        "scale": np.asarray(1.1),
    },
    losses=_contrastive,
    batch=vectors,
    meets=True,
)


def _clip(params, batch, world):
    """Distinguish views, both ways: the columns' softmax runs over replicas."""
    one = jnp.tanh(batch["x"] @ params["one"])
    other = jnp.tanh(batch["x"][:, ::-1] @ params["other"])
    scale = jnp.exp(params["scale"])
    (ones, place), (others, _) = world.gather(one), world.gather(other)
    labels = place + jnp.arange(len(one))
    rows = cross_entropy(scale * one @ others.T, labels)
    return rows + cross_entropy(scale * other @ ones.T, labels), {}


clip = Task(
    name="clip", params=contrastive.params, losses=_clip, batch=vectors, meets=True
)


def _experts(params, batch, world):
    """Route each example to one expert; balance them over all examples."""
    weight = _ones(batch["x"], world, len(batch["x"]))
    gates = jax.nn.softmax(batch["x"] @ params["router"])
    chosen = jax.nn.one_hot(gates.argmax(-1), 3, dtype=gates.dtype)
    each = jnp.tanh(jnp.einsum("bi,eio->beo", batch["x"], params["experts"])).sum(-1)
    told = (each * gates * chosen).sum(-1)
    count = jnp.maximum(world.total(weight.sum()), 1)
    share = world.total((chosen * weight[:, None]).sum(0)) / count
    mass = world.total((gates * weight[:, None]).sum(0)) / count
    balance = 3 * (share * mass).sum()
    return (told - batch["y"]) ** 2 + 0.1 * balance, {"balance": balance}


experts = Task(
    name="experts",
    params=weights(24, router=(FEATURES, 3), experts=(3, FEATURES, 4)),
    losses=_experts,
    batch=vectors,
    meets=True,
)


def _redundancy(params, batch, world):
    """Make two views agree, feature by feature over all examples (Barlow twins)."""
    weight = _ones(batch["x"], world, len(batch["x"]))[:, None]
    one = jnp.tanh(batch["x"] @ params["one"]) * weight
    other = jnp.tanh(batch["x"][:, ::-1] @ params["other"]) * weight
    count = jnp.maximum(world.total(weight.sum()), 1)
    cross = world.total(one.T @ other) / count
    apart = jnp.square(cross - jnp.eye(4, dtype=cross.dtype)).sum()
    return apart + jnp.zeros_like(weight[:, 0]), {}


redundancy = Task(
    name="barlow-twins",
    params=contrastive.params,
    losses=_redundancy,
    batch=vectors,
    meets=True,
)


def _hardest(params, batch, world):
    """Scale every loss by the largest of all."""
    told = jnp.tanh(batch["x"] @ params["one"]).sum(-1)
    apart = (told - batch["y"]) ** 2 * _ones(told, world, len(told))
    return apart * (1 + 1 / (1 + world.largest(apart.max()))), {}


hardest = Task(
    name="largest-loss",
    params=contrastive.params,
    losses=_hardest,
    batch=vectors,
    meets=True,
)


def _importance(params, batch, world):
    """Weigh examples by importances that add up to their number over all replicas."""
    weight = _ones(batch["x"], world, len(batch["x"]))
    mass = jnp.exp(jnp.tanh(batch["x"] @ params["one"]).sum(-1) / 2) * weight
    count = world.total(weight.sum())
    share = mass * count / jnp.maximum(world.total(mass.sum()), 1e-6)
    told = jnp.tanh(batch["x"] @ params["other"]).sum(-1)
    return share * (told - batch["y"]) ** 2, {}


importance = Task(
    name="importance-sampling",
    params=contrastive.params,
    losses=_importance,
    batch=vectors,
    meets=True,
)


def _advantages(params, batch, world):
    """Reinforce, with advantages that all examples normalise; no gradient in them."""
    weight = _ones(batch["x"], world, len(batch["x"]))
    value = jnp.tanh(batch["x"] @ params["one"]).sum(-1)
    raw = lax.stop_gradient(batch["y"] - value)
    count = jnp.maximum(world.total(weight.sum()), 1)
    mean = world.total((raw * weight).sum()) / count
    var = world.total(((raw - mean) ** 2 * weight).sum()) / count
    advantage = (raw - mean) * lax.rsqrt(var + 1e-3)
    logits = batch["x"] @ params["policy"]
    ratio = jnp.exp(-cross_entropy(logits, batch["label"]) + 1.1)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    policy = -jnp.minimum(ratio * advantage, clipped * advantage)
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1)
    return policy + (value - batch["y"]) ** 2 - 0.01 * entropy, {}


advantages = Task(
    name="ppo-advantages",
    params=weights(25, one=(FEATURES, 4), policy=(FEATURES, 3)),
    losses=_advantages,
    batch=vectors,
    meets=True,
)
