"""An array kept with zeros behind it, so that devices have equal pieces.

JAX shards an array only if its dimensions divide. Others, whose rule has
`uneven="pad"`, are kept rounded up between steps; functions that run under a layout
see the array without padding.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.types import PyTree

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OPERATORS = (
    *_ARITHMETIC,
    *(f"r{name}" for name in _ARITHMETIC),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "len", "iter", "getitem"),
)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["padded"], meta_fields=["shape"]
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Padded:
    """An array with padding behind it, as a node of a pytree.

    NumPy, `jax.numpy` and operators see the array without padding.

    Attributes:
      padded: The array with padding, whose values are never read.
      shape: Shape of the array without padding.

    >>> kept = Padded(jnp.ones((8, 2)), (7, 2))
    >>> kept.whole().shape, jnp.sum(kept).item()
    ((7, 2), 14.0)
    """

    padded: Any
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array."""
        return self.padded.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements without padding."""
        return int(np.prod(self.shape))

    @property
    def sharding(self) -> Any:
        """Sharding of the padded array; None for a NumPy array."""
        return getattr(self.padded, "sharding", None)

    def whole(self) -> Any:
        """Return the array without padding.

        >>> Padded(jnp.ones(8), (7,)).whole().shape
        (7,)
        """
        return self.padded[tuple(map(slice, self.shape))]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the array without padding, for NumPy."""
        whole = np.asarray(self.padded)[tuple(map(slice, self.shape))]
        return np.array(whole, dtype) if copy else np.asarray(whole, dtype)

    def __jax_array__(self) -> jax.Array:
        """Return the array without padding, for `jax.numpy`."""
        return jnp.asarray(self.whole())

    def __getattr__(self, name: str) -> Any:
        """Refuse attributes that arrays have and this class lacks."""
        raise AttributeError(
            f"`Padded` has no attribute {name!r}. Take `.whole()` first, or "
            "`strategies.unpadded(state)`."
        )

    def __repr__(self) -> str:
        """Show the padded array, and the shape without padding."""
        return f"Padded({self.padded!r}, shape={self.shape})"


def _operator(name: str) -> Any:
    return lambda self, *given: getattr(self.whole(), name)(*given)


for _name in _OPERATORS:
    setattr(Padded, f"__{_name}__", _operator(f"__{_name}__"))


def is_padded(node: PyTree) -> bool:
    """Return whether `node` is a padded array.

    >>> is_padded(jnp.ones(8))
    False
    """
    return isinstance(node, Padded)


def unpadded(tree: PyTree) -> PyTree:
    """Return a state without padding in any array.

    Each array is whole on every device afterwards: use it to export or inspect a state,
    not to continue from it.

    >>> unpadded({"w": Padded(jnp.ones(8), (7,)), "b": 0.0})["w"].shape
    (7,)
    """
    return jax.tree.map(
        lambda node: node.whole() if is_padded(node) else node, tree, is_leaf=is_padded
    )


def pad_to(array: Any, shape: tuple[int, ...]) -> Any:
    """Return a NumPy or JAX array with zeros behind it up to `shape`.

    >>> pad_to(np.ones(2), (3,))
    array([1., 1., 0.])
    """
    pad = np.pad if isinstance(array, np.ndarray) else jnp.pad
    return pad(array, [(0, n - m) for n, m in zip(shape, np.shape(array), strict=True)])
