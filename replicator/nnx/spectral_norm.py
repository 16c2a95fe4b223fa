"""Spectral norm as a module around another."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from replicator.collectives.moments import wider_dtype
from replicator.errors import ArgumentError, check_number


class SpectralNorm(nnx.Module):
    """A layer whose kernel is divided by an estimate of its largest singular value.

    Miyato et al. 2018, "Spectral normalization for generative adversarial networks",
    algorithm 1, in the place of `flax.nnx.SpectralNorm`. Each call estimates by one
    step of power iteration; in `train()` mode it also keeps the singular vector for the
    next. Gradients take both vectors as constants.

    The vector reads no batch, so it moves once per update whatever the accumulation.
    The kernel in the layer stays as the optimizer left it: only the call divides it.

    Attributes:
      layer: A layer with a `kernel`; its other parameters are used as they are.
      vector: Right singular vector of the kernel, always float32 [outputs].

    >>> dense = SpectralNorm(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    >>> for _ in range(20):
    ...     y = dense(jnp.eye(3))         # each call knows the singular value better
    >>> round(float(jnp.linalg.norm(y, 2)), 4)
    1.0
    """

    def __init__(
        self,
        layer: nnx.Module,
        *,
        epsilon: float = 1e-12,
        rngs: nnx.Rngs,
    ) -> None:
        """Put a norm around a layer.

        Args:
          layer: The layer, `nnx.Linear` or `nnx.Conv` for example. All axes of its
            `kernel` but the last are the rows of a matrix.
          epsilon: Largest singular value at which a kernel counts as zeros, and is left
            as it is.
          rngs: Random keys for the first vector.

        Raises:
          ArgumentError: The layer has no parameter `kernel`.
        """
        check_number("epsilon", epsilon)
        kernel = getattr(layer, "kernel", None)
        if not isinstance(kernel, nnx.Param):
            raise ArgumentError(
                f"`layer` must have a parameter `kernel`, got `{type(layer).__name__}`."
                " Use `nnx.Linear` on one-hot labels in the place of `nnx.Embed`."
            )
        outputs = kernel[...].shape[-1]
        vector = jax.random.normal(rngs.params(), (outputs,), jnp.float32)
        self.layer = layer
        self.vector = nnx.BatchStat(_unit(vector, epsilon))
        self.epsilon = epsilon
        self.use_running_average = False  # set by `train()` and `eval()`

    def __call__(self, *args: Any) -> Any:
        """Call the layer with its weight divided.

        Args:
          *args: Arguments of the layer.

        Returns:
          Its result.
        """
        layer: Any = nnx.clone(self.layer)  # its own kernel stays as it is
        kernel = layer.kernel[...]
        matrix = kernel.reshape(-1, kernel.shape[-1])
        matrix = matrix.astype(wider_dtype(matrix.dtype, self.vector[...].dtype))
        fixed = lax.stop_gradient(matrix)
        left = _unit(fixed @ self.vector[...], self.epsilon)
        right = _unit(left @ fixed, self.epsilon)
        sigma = left @ matrix @ right
        # A kernel of zeros stays, and so does the vector: out of zeros no power
        # iteration finds one again.
        is_zero = sigma <= self.epsilon
        if not self.use_running_average:
            moved = right.astype(self.vector[...].dtype)
            self.vector.set_value(jnp.where(is_zero, self.vector[...], moved))
        sigma = jnp.where(is_zero, 1, sigma)
        divided = (matrix / sigma).reshape(kernel.shape).astype(kernel.dtype)
        layer.kernel.set_value(divided)
        return layer(*args)


def _unit(x: Float[Array, "n"], epsilon: float) -> Float[Array, "n"]:
    return x * lax.rsqrt(jnp.maximum(x @ x, epsilon**2))
