"""An array that is kept with zeros behind it, so that devices have equal pieces.

JAX cuts an array over devices only where its dimensions divide. One that does not, and
whose rule says `uneven="pad"`, is kept between steps rounded up; functions that run
under a layout see it as it is meant.
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

    NumPy, `jax.numpy` and operators take it for the array without padding.

    Attributes:
      padded: The array with padding. What is in the padding is never read.
      shape: Of the array itself.

    >>> kept = Padded(jnp.ones((8, 2)), (7, 2))
    >>> kept.whole().shape, jnp.sum(kept).item()
    ((7, 2), 14.0)
    """

    padded: Any
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """Its dtype."""
        return self.padded.dtype

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it has, without padding."""
        return int(np.prod(self.shape))

    @property
    def sharding(self) -> Any:
        """Where it lies, with its padding; None for an array of NumPy."""
        return getattr(self.padded, "sharding", None)

    def whole(self) -> Any:
        """Return the array itself, without padding."""
        return self.padded[tuple(map(slice, self.shape))]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the array itself, for NumPy."""
        whole = np.asarray(self.padded)[tuple(map(slice, self.shape))]
        return np.array(whole, dtype) if copy else np.asarray(whole, dtype)

    def __jax_array__(self) -> jax.Array:
        """Return the array itself, for `jax.numpy`."""
        return jnp.asarray(self.whole())

    def __getattr__(self, name: str) -> Any:
        """Refuse what an array has and this has not."""
        raise AttributeError(
            f"`Padded` has no attribute {name!r}. Take `.whole()` first, or "
            "`strategies.unpadded(state)`."
        )

    def __repr__(self) -> str:
        """Say what it is, and how it is kept."""
        return f"Padded({self.padded!r}, shape={self.shape})"


def _operator(name: str) -> Any:
    return lambda self, *given: getattr(self.whole(), name)(*given)


for _name in _OPERATORS:
    setattr(Padded, f"__{_name}__", _operator(f"__{_name}__"))


def is_padded(node: PyTree) -> bool:
    """Tell whether `node` is an array that is kept with padding."""
    return isinstance(node, Padded)


def unpadded(tree: PyTree) -> PyTree:
    """Return a state with its arrays as they are meant, none of them padded.

    Each is whole on every device afterwards: to export or to look at. To go on with
    hand over the state as it is.

    >>> unpadded({"w": Padded(jnp.ones(8), (7,)), "b": 0.0})["w"].shape
    (7,)
    """
    return jax.tree.map(
        lambda node: node.whole() if is_padded(node) else node, tree, is_leaf=is_padded
    )


def pad_to(array: Any, shape: tuple[int, ...]) -> Any:
    """Return an array of NumPy, or of JAX, with zeros behind it up to `shape`."""
    pad = np.pad if isinstance(array, np.ndarray) else jnp.pad
    return pad(array, [(0, n - m) for n, m in zip(shape, np.shape(array), strict=True)])
