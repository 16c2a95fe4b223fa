"""Functions of Python that are ops: what an island runs beside its devices."""

import dataclasses
import functools
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from replicator.base.types import PyTree
from replicator.distributed.child import pickled, unpickled
from replicator.errors import ArgumentError


class HostFunction:
    """A function of the host; all its calls on an island are of one object there.

    Args:
      call: The function, with what it holds: an environment, a file.

    Attributes:
      token: Its name there.
    """

    def __init__(self, call: Callable[..., PyTree]) -> None:
        self.call = call
        self.token = secrets.token_hex(8)

    @functools.cached_property
    def _pickled(self) -> bytes:
        return pickled(self.call)

    def __reduce__(self) -> Any:
        """Travel once to a process: a second arrival is the first."""
        return _arrived, (self.token, self._pickled)


def _arrived(token: str, data: bytes) -> HostFunction:
    with _arriving:  # computations are loaded in threads of their own
        if token not in _made:  # functions that are pickled alike are not one
            _made[token] = HostFunction(unpickled(data))
        return _made[token]


_made: dict[str, HostFunction] = {}
_arriving = threading.RLock()  # guards it


def forget_function(token: str) -> None:
    """Free a function that arrived; calls of it that wait keep it."""
    with _arriving:
        _made.pop(token, None)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HostRun:
    """A call of a function of the host, on arrays of NumPy.

    Attributes:
      function: The function.
      label: Its name.
      tree: Structure of its arguments.
      operands: For each leaf, its position among the inputs, or a number.
      shapes: What it returns.
      results: Positions of the leaves that something takes.
    """

    function: HostFunction
    label: str
    tree: Any
    operands: Sequence[tuple[int | None, Any]]
    shapes: PyTree
    results: Sequence[int]

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Call it.

        Raises:
          ArgumentError: It does not return what was said.
        """
        leaves = [n if at is None else arrays[at] for at, n in self.operands]
        found = self.function.call(*jax.tree.unflatten(self.tree, leaves))
        made = jax.tree.map(_array, found)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), made)
        if shapes != self.shapes:
            raise ArgumentError(
                f"`{self.label}` must return what `result` of `pw.host` says, "
                f"{self.shapes}, got {shapes}. Change one of them."
            )
        returned = jax.tree.leaves(made)
        return [returned[at] for at in self.results]


def _array(value: Any) -> np.ndarray:
    """Return what JAX makes of it: without `jax_enable_x64`, 32 bits of 64."""
    array = np.asarray(value)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
