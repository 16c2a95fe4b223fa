"""Refuse a batch that would fail, recompile or poison a step, and name the leaf.

The first batch of a run fixes the form of all: keys, containers, dtypes, trailing
shapes and the number of examples. Dtypes are compared as JAX will hold them, so float64
and float32 are one where 64-bit types are off.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.number_lists import NUMBER, lists_as_arrays
from replicator.base.trees import leaf_path, named_leaves
from replicator.base.types import PyTree
from replicator.errors import BatchError, NonFiniteError

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes of rows by the path of their leaf."""

NATIVE_REMEDY = "Convert it: `array.astype(array.dtype.newbyteorder('='))`."


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchForm:
    """Structure, dtypes and shapes that all batches of one dataset share.

    Attributes:
      structure: Containers around the leaves.
      leaves: Dtype and trailing shape by path: `float32[*,8,8,1]`.
      examples: Leading size of every leaf; only a last batch may have fewer.
    """

    structure: Any
    leaves: dict[str, str]
    examples: int


def numeric_arrays(batch: PyTree, *, where: str) -> PyTree:
    """Return `batch` with every leaf a numeric array, of NumPy or of JAX.

    A list of Python numbers is an array: see `lists_as_arrays`.

    >>> numeric_arrays({"x": ["cat"]}, where="batch 3")
    Traceback (most recent call last):
    replicator.errors.BatchError: `dataset` must yield arrays of numbers, got `str` ...

    Args:
      batch: Batch of a dataset.
      where: Its place for error messages: "batch 3".

    Raises:
      BatchError: A leaf is not an array, has no batch axis, or holds no numbers.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _numeric_array(leaf, path=leaf_path(path), where=where),
        lists_as_arrays(batch, name="dataset", where=where),
    )


def form_of(batch: PyTree, *, where: str) -> BatchForm:
    """Describe a batch of arrays.

    >>> form_of({"x": np.zeros((8, 2), np.float32)}, where="batch 3").leaves
    {'x': 'float32[*,2]'}

    Raises:
      BatchError: It has no leaf, no example, or leaves of different leading sizes.
    """
    leaves = named_leaves(batch)
    if not leaves:
        raise BatchError(
            f"`dataset` must yield batches that hold arrays, got {batch!r} ({where}). "
            "Yield a dict of arrays."
        )
    first_path, first = leaves[0]
    for path, leaf in leaves:
        if len(leaf) != len(first):
            raise BatchError(
                "`dataset` must yield leaves of one leading size, got "
                f"`{first_path}` with {len(first)} and `{path}` with {len(leaf)} "
                f"({where}). Give each leaf one row per example."
            )
    if not len(first):
        raise BatchError(
            f"`dataset` must yield at least one example per batch, got 0 ({where}). "
            "Leave empty batches out."
        )
    return BatchForm(
        structure=jax.tree.structure(batch),
        leaves={path: _describe_rows(leaf) for path, leaf in leaves},
        examples=len(first),
    )


def check_same_form(first: BatchForm, found: BatchForm, *, where: str) -> None:
    """Refuse a batch whose form differs from the first one's; it may be smaller.

    Raises:
      BatchError: Keys, containers, dtypes or shapes differ, or it has more examples.
    """
    if first.leaves.keys() != found.leaves.keys():
        raise BatchError(
            "`dataset` must yield the leaves of its first batch every time, got "
            f"{_changes(first.leaves, found.leaves)} ({where}). Make all batches alike."
        )
    for path, rows in found.leaves.items():
        if rows != first.leaves[path]:
            raise BatchError(
                f"`dataset` must yield `{path}` as {first.leaves[path]} like its first "
                f"batch, got {rows} ({where}). Cast, crop or pad it in the input."
            )
    if first.structure != found.structure:
        raise BatchError(
            "`dataset` must yield the containers of its first batch every time, got "
            f"{found.structure} instead of {first.structure} ({where}). "
            "Make all batches alike."
        )
    if found.examples > first.examples:
        raise BatchError(
            f"`dataset` must yield at most the {first.examples} examples of its first "
            f"batch every time, got {found.examples} ({where}). "
            "Let only the last batch of an epoch have another size, a smaller one."
        )


def stated_form(
    first: BatchForm, found: BatchForm, shapes: Sequence[Shapes], *, where: str
) -> BatchForm:
    """Return the first form with the shapes of rows of the stated one that was found.

    Args:
      first: Form of the first batch.
      found: Form of this batch.
      shapes: Stated shapes of rows.
      where: Its place for error messages: "batch 3".

    Raises:
      BatchError: The batch has none of the stated forms.
    """
    for stated in shapes:
        leaves = first.leaves | {
            path: f"{first.leaves.get(path, '').partition('[')[0]}{_rows(shape)}"
            for path, shape in stated.items()
        }
        if leaves == found.leaves:
            return dataclasses.replace(first, leaves=leaves)
    named = [f"`{path}` {rows}" for path, rows in found.leaves.items()]
    raise BatchError(
        f"`dataset` must yield one of the {len(shapes)} forms that `inputs.shapes` "
        f"states, got {', '.join(named)} ({where}). Crop or pad it, or state its form."
    )


def check_no_nan(batch: PyTree, *, where: str) -> None:
    """Refuse NaN in host arrays; arrays already on a device are not read back.

    >>> check_no_nan({"x": np.zeros(8)}, where="batch 3")

    Raises:
      NonFiniteError: A leaf holds NaN.
    """
    if not any(map(_holds_nan, jax.tree.leaves(batch))):
        return
    for path, leaf in named_leaves(batch):
        if _holds_nan(leaf):
            nan = np.isnan(leaf)
            example = int(np.argwhere(nan)[0][0])
            raise NonFiniteError(
                f"`dataset` must yield no NaN, got one in `{path}`, example {example} "
                f"({where}). Clean that example, or pass "
                "`inputs=InputOptions(allow_nan=True)`."
            )


def quick_form(batch: PyTree) -> tuple | None:
    """Return a key that full batches of NumPy arrays share, or None for other batches.

    >>> quick_form({"x": [1, 2]}) is None
    True
    """
    leaves, structure = jax.tree.flatten(batch)
    if not all(type(leaf) is np.ndarray for leaf in leaves):
        return None
    return structure, [(leaf.dtype, leaf.shape) for leaf in leaves]


def _holds_nan(leaf: np.ndarray | jax.Array) -> bool:
    if not _can_be_nan(leaf.dtype) or isinstance(leaf, jax.Array):
        return False
    return bool(np.isnan(leaf).any())


def check_divides(
    global_batch: int, *, parts: int, kind: str, accumulate: int, where: str = ""
) -> None:
    """Refuse a batch that cannot be cut into equal parts with an example in each.

    >>> check_divides(100, parts=8, kind="replicas", accumulate=1)
    Traceback (most recent call last):
    replicator.errors.BatchError: `global_batch` must divide evenly over 8 replicas, ...

    Args:
      global_batch: Number of examples.
      parts: Number of equal parts.
      kind: Name of the parts in the plural: "replicas".
      accumulate: Microbatches of each part.
      where: Its place for error messages: "batch 3".

    Raises:
      BatchError: It does not divide by parts times microbatches.
    """
    unit = parts * accumulate
    if global_batch > 0 and global_batch % unit == 0:
        return
    over = f"{parts} {kind}"
    if accumulate > 1:
        over += f" and {accumulate} microbatches"
    raise BatchError(
        f"`global_batch` must divide evenly over {over}, got {global_batch}"
        f"{f' ({where})' if where else ''}. "
        f"Use {nearest_multiples(global_batch, unit)}."
    )


def nearest_multiples(size: int, divisor: int) -> str:
    """Return the nearest positive sizes that divide, as text.

    >>> nearest_multiples(100, 8)
    '96 or 104'
    """
    below = size // divisor * divisor
    above = max(below, 0) + divisor
    return f"{below} or {above}" if below > 0 else f"{above}"


# Cached: JAX takes microseconds for each leaf of each batch.
@functools.lru_cache(maxsize=64)
def _can_be_nan(dtype: Any) -> bool:
    return _is_kind(dtype, np.inexact)


@functools.lru_cache(maxsize=64)
def holds_numbers(dtype: Any) -> bool:
    """Return whether arrays of `dtype` hold numbers or booleans, also in JAX.

    >>> holds_numbers(np.dtype("float32")), holds_numbers(np.dtype("U3"))
    (True, False)
    """
    # NumPy counts durations among signed integers.
    is_time = getattr(dtype, "kind", "") in "mM"
    return not is_time and (_is_kind(dtype, np.number) or _is_kind(dtype, np.bool_))


def canonical_dtype(dtype: Any) -> np.dtype:
    """Return the dtype that JAX gives an array of `dtype`.

    >>> canonical_dtype(np.float64)
    dtype('float32')
    """
    return _canonical_dtype(dtype, jax.config.read("jax_enable_x64"))


@functools.lru_cache(maxsize=64)
def _canonical_dtype(dtype: Any, has_64_bits: bool) -> np.dtype:
    del has_64_bits  # part of the key: a program may switch it between two datasets
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _numeric_array(leaf: Any, *, path: str, where: str) -> np.ndarray | jax.Array:
    # NumPy can read other libraries' arrays (a PyTorch tensor on the host, a pandas
    # column) that have `__array__`.
    if isinstance(leaf, NUMBER):
        leaf = np.asarray(leaf)
    readable = isinstance(leaf, jax.Array) or hasattr(leaf, "__array__")
    array = leaf if isinstance(leaf, jax.Array) or not readable else np.asarray(leaf)
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise BatchError(
            "`dataset` must yield arrays that are still there, got one that a call "
            f"took over for `{path}` ({where}). Yield a copy."
        )
    if not readable or not holds_numbers(array.dtype):
        found = _describe_rows(array) if readable else f"`{type(leaf).__name__}`"
        place = f" for `{path}`" if path else ""
        raise BatchError(
            f"`dataset` must yield arrays of numbers, got {found}{place} "
            f"({where}). Encode it as a numeric array, or leave it out."
        )
    if not getattr(array.dtype, "isnative", True):
        raise BatchError(
            "`dataset` must yield arrays in this machine's byte order, got "
            f"{array.dtype.str} for `{path}` ({where}). {NATIVE_REMEDY}"
        )
    if array.ndim == 0:
        raise BatchError(
            f"`dataset` must yield leaves with a leading batch axis, got the scalar "
            f"`{path}` ({where}). Repeat it for each example, or leave it out."
        )
    check_fits(array, path=path, name="dataset", where=f" ({where})")
    return array


_VERB = {"dataset": "yield"}


def check_fits(
    array: np.ndarray | jax.Array, *, path: str, name: str, where: str = ""
) -> None:
    """Refuse integers that JAX would cut to 32 bits.

    >>> check_fits(np.arange(3), path="ids", name="batch")

    Args:
      array: A leaf of a batch.
      path: Its path.
      name: Name of the argument that holds it, for errors.
      where: Its place likewise: " (batch 3)".

    Raises:
      BatchError: One is beyond.
    """
    target = canonical_dtype(array.dtype)
    if target == array.dtype or not _is_kind(target, np.integer) or not array.size:
        return
    limits = np.iinfo(target)
    low, high = int(array.min()), int(array.max())
    if low < limits.min or high > limits.max:
        raise BatchError(
            f"`{name}` must {_VERB.get(name, 'hold')} `{path}` within the range of "
            f"{target}, got values from {low} to {high}{where}. Set `jax_enable_x64`, "
            "or use smaller ids."
        )


def _is_kind(dtype: Any, kind: Any) -> bool:
    return bool(jnp.issubdtype(dtype, kind))


def _describe_rows(array: np.ndarray | jax.Array) -> str:
    dtype = array.dtype
    if holds_numbers(dtype):
        dtype = canonical_dtype(dtype)
    return f"{dtype}{_rows(array.shape[1:]) if array.ndim else '[]'}"


def _rows(shape: Sequence[int]) -> str:
    return f"[{','.join(['*', *map(str, shape)])}]"


def _changes(expected: dict[str, str], found: dict[str, str]) -> str:
    missing = [f"no `{path}`" for path in expected if path not in found]
    extra = [f"a new `{path}`" for path in found if path not in expected]
    return ", ".join(missing + extra)
