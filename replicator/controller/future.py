"""Futures: results of dataflows, which wait when they are read."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.types import PyTree
from replicator.controller.islands.protocol import Island, Key, lost_with
from replicator.controller.islands.waiting.outcome import Outcome
from replicator.controller.islands.waiting.room import room_for
from replicator.controller.layouts import SliceLayout
from replicator.controller.slices import Slice
from replicator.errors import ArgumentError

# The operators of an array, each by `__array_ufunc__`; typed as their base is not.
_MOST_RUNS = 64
_Operators: type = object if TYPE_CHECKING else np.lib.mixins.NDArrayOperatorsMixin


class Pending:
    """Result of a run that is not computed yet; it outlives the future that reads it.

    Attributes:
      done: Ends when it is computed, or with the error of the op that failed.
      takers: Runs that take it, with its number there; `Runs` guards it.
      made_s: When it was computed.
    """

    def __init__(self) -> None:
        self.done = Outcome()
        self.takers: list[tuple[Any, int]] = []
        self.made_s = 0.0


class ClientRecord:
    """A client: futures refer to it, not to the object that users have.

    Attributes:
      number: Its number.
      name: Its name.
      room: Of runs that are not done, so that one client's do not delay another's.
      has_left: Whether its futures are freed.
    """

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.room = room_for(_MOST_RUNS)
        self.has_left = False


class Future(_Operators):
    """An array that a dataflow computes, on a slice; printing or converting it waits.

    It is a leaf of a tree, and may be passed to other functions and dataflows of the
    same `pw` at once. Its memory is freed when nothing refers to it any more.

    Attributes:
      slice: Slice that holds it.
      shape: Its shape.
      dtype: Its dtype.
    """

    # NumPy asks: its own arrays leave operations with it to it.
    __array_priority__ = 1000

    def __init__(
        self,
        *,
        island: Island,
        key: Key,
        drop: Callable[[Key], None],
        client: ClientRecord,
        pending: Pending,
        on: Slice,
        layout: SliceLayout,
        aval: jax.ShapeDtypeStruct,
    ) -> None:
        self._island = island
        self._key = key
        self._drop = drop
        self._client = client
        self._pending = pending
        self._layout = layout
        self._is_weak = aval.weak_type
        self._donated_to = ""
        self.slice = on
        self.shape: tuple[int, ...] = aval.shape
        self.dtype = aval.dtype

    def __del__(self) -> None:
        """Free its memory, after the ops that take it."""
        self._drop(self._key)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __copy__(self) -> Self:
        """Return it: a second future would free its memory."""
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """Return it, as it never changes."""
        return self

    def __reduce__(self) -> Any:
        """Wait, and pickle it as an array of JAX."""
        return self.result().__reduce__()

    def done(self) -> bool:
        """Return whether it is computed, or never will be."""
        return self._pending.done.done()

    def result(self, timeout_s: float | None = None) -> jax.Array:
        """Wait for it, and return it as an array on the devices of its slice.

        Args:
          timeout_s: Seconds to wait at the most.

        Raises:
          OpFailedError: An op that it depends on failed; `IslandLostError` if its
            island was lost, or it with that.
          TimeoutError: It was not computed in time.
          ArgumentError: An op took its memory, or its client or slice is gone.
        """
        ask([self])
        self._wait(timeout_s)
        return self._island.read([self._key])[0]

    def _wait(self, timeout_s: float | None = None) -> None:
        self._check()
        try:
            error = self._pending.done.exception(timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"`timeout_s` must be enough for its ops, got {timeout_s}, in which "
                f"a future on {self.slice} was not computed. Wait longer."
            ) from None
        self._check()
        if error is not None:
            raise error.with_traceback(None)

    def _check(self) -> None:
        if self._donated_to:
            raise ArgumentError(
                f"a future must not be used after it was donated, got one that "
                f"`{self._donated_to}` took. Use what that returned, or leave it out "
                "of `donate`."
            )
        if self._client.has_left:
            raise ArgumentError(
                f"a future must be of a client that is there, got one of "
                f"`{self._client.name}`, which left. Read it inside of the client's "
                "`with` statement."
            )
        self.slice.check_open("a future")

    def _check_usable(self) -> None:
        """Refuse it as an argument of an op."""
        self._check()
        if self._island.why_lost:
            raise lost_with(self._island)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Wait, and return it as an array of NumPy."""
        return np.array(self.result(), dtype=dtype, copy=copy)

    def __jax_array__(self) -> jax.Array:
        """Wait, and return it as an array of JAX."""
        return self.result()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any):
        """Wait, and do an operation of arrays: `future + 1`."""
        if method != "__call__" or kwargs:
            return NotImplemented
        values = [x.result() if isinstance(x, Future) else x for x in inputs]
        return getattr(jnp, ufunc.__name__)(*values)

    def __getitem__(self, index: Any) -> jax.Array:
        """Wait, and return a part."""
        return self.result()[index]

    def __len__(self) -> int:
        """Return the size of its first dimension."""
        if not self.shape:
            raise TypeError("len() of a future without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[jax.Array]:
        """Wait, and return its parts along the first dimension."""
        return iter(self.result())

    def __float__(self) -> float:
        """Wait, and convert it."""
        return float(self.result())

    def __int__(self) -> int:
        """Wait, and convert it."""
        return int(self.result())

    def __bool__(self) -> bool:
        """Wait, and convert it."""
        return bool(self.result())

    def __str__(self) -> str:
        """Wait, and return its text."""
        return str(self.result())

    def __format__(self, spec: str) -> str:
        """Wait, and return its text: `f"{loss:.3f}"`."""
        return format(self.result(), spec)

    def __repr__(self) -> str:
        """Wait, and return its text."""
        return repr(self.result())


def ask(futures: Iterable[Future]) -> None:
    """Have what is not computed yet come when it is, for a call that will read all.

    What is on one island comes in one message.

    Raises:
      ArgumentError: An op took the memory of one, or its client or slice is gone.
    """
    by_island: dict[Island, list[Key]] = {}
    for future in futures:
        future._check()
        if not future.done():
            by_island.setdefault(future._island, []).append(future._key)
    for island, keys in by_island.items():
        island.ask(keys)


def read(tree: PyTree) -> PyTree:
    """Wait for all futures of a tree; return it with arrays in their place.

    What is on one island comes in one message: for the numbers of a step.

    Raises:
      OpFailedError: An op that one depends on failed.
      ArgumentError: An op took the memory of one.

    >>> with controller.local(islands=1, devices=1) as pw:
    ...     controller.read({"loss": pw.put(jnp.ones(2), pw.slice(1)), "step": 3})
    {'loss': Array([1., 1.], dtype=float32), 'step': 3}
    """
    leaves, structure = jax.tree.flatten(tree)
    ask(leaf for leaf in leaves if isinstance(leaf, Future))
    by_island: dict[int, list[int]] = {}
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Future):
            leaf._wait()
            by_island.setdefault(id(leaf._island), []).append(at)
    for places in by_island.values():
        island = leaves[places[0]]._island
        found = island.read([leaves[at]._key for at in places])
        for at, array in zip(places, found, strict=True):
            leaves[at] = array
    return jax.tree.unflatten(structure, leaves)
