"""Losses of small models, each with another way from its weights to the loss.

Widths divide by eight, so that every strategy cuts what it can; all but one.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

import replicator
from replicator.base.types import PyTree

Params = dict[str, Any]


def mlp(params: Params, batch: PyTree) -> Array:
    """Return the loss of two layers; also for widths that do not divide."""
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    return jnp.square(hidden @ params["down"] - batch["y"]).mean()


def conv_norm(params: Params, batch: PyTree) -> tuple[Array, PyTree]:
    """Return the loss behind a batch norm over all replicas, and its moments."""
    y = lax.conv_general_dilated(
        batch["image"],
        params["kernel"],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    mean = replicator.all_reduce(y.mean((0, 1, 2), keepdims=True))
    var = replicator.all_reduce(jnp.square(y - mean).mean((0, 1, 2), keepdims=True))
    y = (y - mean) * lax.rsqrt(var + 1e-3) * params["scale"] + params["bias"]
    logits = jax.nn.relu(y).mean((1, 2)) @ params["head"]
    return _cross_entropy(logits, batch["label"]), {"mean": mean, "var": var}


def tied(params: Params, batch: PyTree) -> Array:
    """Return the loss of words by a table that is gathered from and multiplied by."""
    x = params["table"][batch["word"]] + params["place"]
    x = jnp.tanh(x @ params["dense"])
    return _cross_entropy(x @ params["table"].T, batch["next"])


def remat(params: Params, batch: PyTree) -> Array:
    """Return the loss of layers that are computed again, in a loop and outside."""

    def layer(x: Array, w: Array) -> tuple[Array, None]:
        return x + jnp.tanh(x @ w), None

    saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    x, _ = jax.checkpoint(layer, policy=saved)(batch["x"], params["first"])
    x, _ = lax.scan(jax.checkpoint(layer), x, params["layers"])
    return jnp.square(x @ params["last"] - batch["y"]).mean()


def lstm(params: Params, batch: PyTree) -> Array:
    """Return the loss of a recurrent model: weights are constants of its loop."""

    def turn(carry: tuple[Array, Array], x: Array) -> tuple[Any, Array]:
        hidden, cell = carry
        gates = x @ params["in"] + hidden @ params["again"] + params["bias"]
        take, forget, new, give = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(forget + 1) * cell + jax.nn.sigmoid(take) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(give) * jnp.tanh(cell)
        return (hidden, cell), hidden @ params["out"]

    zeros = jnp.zeros((len(batch["x"]), params["again"].shape[0]))
    _, told = lax.scan(turn, (zeros, zeros), batch["x"].swapaxes(0, 1))
    return jnp.square(told.swapaxes(0, 1) - batch["y"]).mean()


def while_loop(params: Params, batch: PyTree) -> Array:
    """Return a loss divided by a matrix norm that a loop finds, until it is exact.

    The loop's condition and its body read the weights; the penalty differentiates what
    it found (Miyato et al. 2018, "Spectral Normalization").
    """
    w = lax.stop_gradient(params["up"])

    def is_rough(carry: tuple[Array, Array, Array]) -> Array:
        turn, u, before = carry
        return (turn < 20) & (jnp.linalg.norm(u @ w) > before * 1.01)

    def turn(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        number, u, _ = carry
        v = u @ w
        again = v @ w.T
        return number + 1, again / jnp.linalg.norm(again), jnp.linalg.norm(v)

    start = jnp.ones(w.shape[0]) / jnp.sqrt(jnp.float32(w.shape[0]))
    _, u, _ = lax.while_loop(is_rough, turn, (jnp.int32(0), start, jnp.float32(0)))
    norm = jnp.linalg.norm(u @ params["up"])
    return mlp({**params, "up": params["up"] / norm}, batch)


def cond(params: Params, batch: PyTree) -> Array:
    """Return the loss of experts of which the number of each layer chooses one."""

    def layer(x: Array, inputs: tuple[Array, PyTree]) -> tuple[Array, None]:
        number, w = inputs
        ways = [lambda x: jnp.tanh(x @ w), lambda x: x @ w.T, lambda x: x * w[0]]
        return x + lax.switch(number, ways, x), None

    x, _ = lax.scan(layer, batch["x"], (jnp.arange(3), params["layers"]))
    is_large = jnp.square(params["last"]).sum() > 1.0
    told = lax.cond(is_large, lambda w: x @ w, lambda w: x @ (2 * w), params["last"])
    return jnp.square(told - batch["y"]).mean()


@jax.custom_vjp
def _fused(x: Array, w: Array) -> Array:
    return jnp.tanh(x @ w)


def _fused_forward(x: Array, w: Array) -> tuple[Array, tuple]:
    y = _fused(x, w)
    return y, (x, w, y)


def _fused_backward(kept: tuple, ct: Array) -> tuple[Array, Array]:
    x, w, y = kept
    inner = ct * (1 - y * y)
    return inner @ w.T, jnp.einsum("bi,bo->io", x, inner)


_fused.defvjp(_fused_forward, _fused_backward)


def custom_vjp(params: Params, batch: PyTree) -> Array:
    """Return the loss of a fused layer, in a loop and outside, and of optax's own rule.

    The last term is not differentiated: there the call stays in the program.
    """
    x = _fused(batch["x"], optax.scale_gradient(params["first"], 0.5))
    x, _ = lax.scan(lambda x, w: (_fused(x, w), None), x, params["layers"])
    told = lax.stop_gradient(_fused(x, params["first"]))
    return jnp.square(x @ params["last"] - batch["y"]).mean() + 0.1 * told.mean()


def scatter(params: Params, batch: PyTree) -> Array:
    """Return the loss of layers whose weights are written into."""
    capped = params["up"].at[:, 0].min(0.7 * params["down"][0, 0])
    up = capped.at[0].set(params["bias"][0])
    return mlp({**params, "up": up}, batch)


def scatters(params: Params, batch: PyTree) -> Array:
    """Return the loss of layers whose weights are written into twice, and looked up."""
    up = params["up"].at[0].set(0.5).at[1].add(params["bias"][0])
    place = jnp.array([0, 3, 3])
    down = params["down"].at[place].add(0.1).at[0].set(0.0)
    seen = jnp.square(down[place]).mean()
    return mlp({**params, "up": up, "down": down}, batch) + seen


def mixed(params: Params, batch: PyTree) -> Array:
    """Return a loss computed in bfloat16, of weights that are kept in two dtypes."""
    half = jnp.bfloat16
    hidden = jnp.tanh(batch["x"].astype(half) @ params["up"].astype(half))
    hidden = hidden * params["scale"] + params["bias"].astype(half)
    told = jnp.dot(hidden, params["down"], preferred_element_type=jnp.float32)
    return jnp.square(told - batch["y"]).mean()


def critic_loss(critic: Params, generator: Params, batch: PyTree) -> Array:
    """Return how badly a critic tells what is real from what is made."""
    real, fake = _judged(critic, batch["x"]), _judged(critic, _made(generator, batch))
    return jax.nn.softplus(-real).mean() + jax.nn.softplus(fake).mean()


def generator_loss(generator: Params, critic: Params, batch: PyTree) -> Array:
    """Return how badly a generator passes."""
    return jax.nn.softplus(-_judged(critic, _made(generator, batch))).mean()


def _made(generator: Params, batch: PyTree) -> Array:
    return jnp.tanh(batch["noise"] @ generator["up"]) @ generator["down"]


def _judged(critic: Params, x: Array) -> Array:
    return jnp.tanh(x @ critic["up"]) @ critic["down"]


def _cross_entropy(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
