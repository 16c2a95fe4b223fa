"""Dense layers as nested dicts of arrays, and the perceptrons of continuous control."""

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Params: TypeAlias = dict[str, Any]

_EPSILON = 1e-6  # added to a variance


def dense_init(
    key: Array, inputs: int, outputs: int, *, scale: float = math.sqrt(2)
) -> Params:
    """Make a dense layer: a kernel of variance scale² / inputs, and no bias yet."""
    # Not orthogonal: that takes minutes where each of eight fake devices does it.
    init = jax.nn.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
    return {"kernel": init(key, (inputs, outputs)), "bias": jnp.zeros(outputs)}


def dense(params: Params, x: Float[Array, "*rows d"]) -> Float[Array, "*rows e"]:
    """Return x times the kernel, plus the bias."""
    y = x @ params["kernel"]
    return y + params["bias"].reshape((1,) * (y.ndim - 1) + (-1,))


def mlp_init(
    key: Array, inputs: int, hidden: int, outputs: int, *, scale: float = math.sqrt(2)
) -> Params:
    """Make a perceptron of two hidden layers; what it returns is near 0 at first.

    `scale` is that of the first layer.
    """
    keys = jax.random.split(key, 3)
    return {
        "in": dense_init(keys[0], inputs, hidden, scale=scale),
        "hidden": dense_init(keys[1], hidden, hidden),
        "out": dense_init(keys[2], hidden, outputs, scale=0.01),
    }


def mlp(params: Params, x: Float[Array, "n d"]) -> Float[Array, "n e"]:
    """Return what a perceptron makes of observations."""
    for name in ("in", "hidden"):
        x = jax.nn.relu(dense(params[name], x))
    return dense(params["out"], x)


def norm_mlp_init(key: Array, inputs: int, hidden: int, outputs: int) -> Params:
    """Make a perceptron whose first layer is normalised."""
    norm = {"scale": jnp.ones(hidden), "bias": jnp.zeros(hidden)}
    return {**mlp_init(key, inputs, hidden, outputs, scale=1.0), "norm": norm}


def norm_mlp(params: Params, x: Float[Array, "n d"]) -> Float[Array, "n e"]:
    """Return what a perceptron makes of observations of any scale.

    Its first layer is normalised (Ba et al. 2016, "Layer normalization") and goes
    through tanh, as in Acme's agents for control (Hoffman et al. 2020, §4).
    """
    x = dense(params["in"], x)
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + _EPSILON)
    norm = params["norm"]
    x = jnp.tanh(x * norm["scale"][None] + norm["bias"][None])
    return dense(params["out"], jax.nn.elu(dense(params["hidden"], x)))
