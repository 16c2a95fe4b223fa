"""Models with their data, in plain jax: what one device, or one replica, computes.

`losses(params, batch, world)` returns one loss per example, [batch] or [batch, time].
Where examples meet, or random bits are drawn, the model asks `world`, of which there
are two: all examples are here, or some are on other replicas.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

ROWS = 32
FEATURES = 4
TIME = 5
WORDS = 7

Tree = Any


class World(NamedTuple):
    """Information of a model about the other examples of its microbatch.

    Attributes:
      keys: One random key per example, or None.
      weight: How much each example counts, [batch]; None where all count alike.
      norm: `norm(x, weight)` returns x normalised, and its mean and variance.
      total: Adds a value up over all examples' holders.
      largest: The largest of it.
      gather: Concatenates rows over all holders; its second result is the place of
        the first row of ours.
      state: Leaves of the state that the loss reads.
    """

    keys: Any = None
    weight: Any = None
    norm: Any = None
    total: Any = None
    largest: Any = None
    gather: Any = None
    state: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model and its data.

    Attributes:
      name: Of the model.
      params: NumPy arrays; they come in JAX's default float.
      losses: `losses(params, batch, world)` returns losses and what else it found.
      batch: `batch(rng)` returns a global batch without `mask`.
      tokens: Whether there is a loss per position.
      meets: Whether the examples of a microbatch meet.
      running: Running statistics to keep: by name, their first value.
    """

    name: str
    params: Tree
    losses: Callable[[Tree, Tree, World], tuple[jax.Array, Tree]]
    batch: Callable[[np.random.Generator], Tree]
    tokens: bool = False
    meets: bool = False
    running: Tree = None


def weights(seed: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Draw weights of these shapes."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=shape) / np.sqrt(max(np.prod(shape[:-1]), 1))
        for name, shape in shapes.items()
    }


def vectors(rng: np.random.Generator) -> Tree:
    return {
        "x": rng.normal(size=(ROWS, FEATURES)),
        "y": rng.normal(size=ROWS),
        "label": rng.integers(0, 3, ROWS).astype(np.int32),
    }


def images(rng: np.random.Generator) -> Tree:
    return {
        "x": rng.normal(size=(ROWS, 4, 4, 1)),
        "label": rng.integers(0, 3, ROWS).astype(np.int32),
    }


def sequences(rng: np.random.Generator) -> Tree:
    return {
        "x": rng.normal(size=(ROWS, TIME, 3)),
        "y": rng.normal(size=(ROWS, TIME)),
    }


def words(rng: np.random.Generator) -> Tree:
    return {"word": rng.integers(0, WORDS, (ROWS, TIME + 1)).astype(np.int32)}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _mlp(params, batch, world):
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    return (hidden @ params["w2"] - batch["y"]) ** 2, {}


MLP_WEIGHTS = weights(1, w1=(FEATURES, 8), b1=(1, 8), w2=(8,))
mlp = Task(name="mlp", params=MLP_WEIGHTS, losses=_mlp, batch=vectors)


def _smoothed(params, batch, world):
    logits = jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"]
    target = optax.smooth_labels(jax.nn.one_hot(batch["label"], 3), 0.1)
    return optax.softmax_cross_entropy(logits, target), {}


smoothed = Task(
    name="smoothed",
    params=weights(2, w1=(FEATURES, 8), w2=(8, 3)),
    losses=_smoothed,
    batch=vectors,
)


def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _conv(params, batch, world):
    y = jax.nn.gelu(convolved(batch["x"], params["kernel"]) + params["bias"])
    logits = y.mean((1, 2)) @ params["head"]
    return cross_entropy(logits, batch["label"]), {}


CONV_WEIGHTS = weights(3, kernel=(3, 3, 1, 4), bias=(1, 1, 1, 4), head=(4, 3))
conv = Task(name="conv", params=CONV_WEIGHTS, losses=_conv, batch=images)


def _lstm(params, batch, world):
    def turn(carry, x):
        hidden, cell = carry
        gates = x @ params["in"] + hidden @ params["again"]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(f + 1) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden @ params["out"]

    zeros = jnp.zeros((len(batch["x"]), 6), batch["x"].dtype)
    _, told = lax.scan(turn, (zeros, zeros), batch["x"].swapaxes(0, 1))
    return (told.T - batch["y"]) ** 2, {}


lstm = Task(
    name="lstm",
    params=weights(4, **{"in": (3, 24), "again": (6, 24), "out": (6,)}),
    losses=_lstm,
    batch=sequences,
    tokens=True,
)


def attended(params, word: jax.Array, *, dropped: Callable = lambda x: x) -> jax.Array:
    """Return logits of the next word; causal attention, tied embeddings."""
    x = params["embed"][word] + params["place"]
    q, k, v = (x @ params[name] for name in ("q", "k", "v"))
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(q.shape[-1]).astype(q.dtype)
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))[None]
    scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
    x = dropped(x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v))
    x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-3)
    return x @ params["embed"].T


def _attention(params, batch, world):
    word = batch["word"]
    return cross_entropy(attended(params, word[:, :-1]), word[:, 1:]), {}


ATTENTION_WEIGHTS = weights(
    5, embed=(WORDS, 8), place=(1, TIME, 8), q=(8, 8), k=(8, 8), v=(8, 8)
)
attention = Task(
    name="attention",
    params=ATTENTION_WEIGHTS,
    losses=_attention,
    batch=words,
    tokens=True,
)


def drop(x: jax.Array, keys: Any) -> jax.Array:
    """Drop half of each example, by its own key."""
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:]))(keys)
    return jnp.where(kept, 2 * x, jnp.zeros_like(x))


def _dropped_mlp(params, batch, world):
    hidden = drop(jnp.tanh(batch["x"] @ params["w1"] + params["b1"]), world.keys)
    return (hidden @ params["w2"] - batch["y"]) ** 2, {}


dropped_mlp = Task(
    name="mlp-dropout", params=MLP_WEIGHTS, losses=_dropped_mlp, batch=vectors
)


def _dropped_attention(params, batch, world):
    word = batch["word"]
    logits = attended(params, word[:, :-1], dropped=lambda x: drop(x, world.keys))
    return cross_entropy(logits, word[:, 1:]), {}


dropped_attention = Task(
    name="attention-dropout",
    params=ATTENTION_WEIGHTS,
    losses=_dropped_attention,
    batch=words,
    tokens=True,
)
