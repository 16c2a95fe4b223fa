"""Merge the arguments of several calls into one value; take a result apart again.

    leaf                          of one call      of n calls
    array, NumPy scalar           shape            shape with n in front
    int (64 bit), float, bool     a number         a 1-d array
    anything else, lists too      a value          a list of n values

Tuples, namedtuples, dictionaries and dataclasses are merged part by part. A result is
split likewise: an array on its first axis, a list by element, those four part by part;
None has nothing to split and is None for every call.

Pure: values in, values out.
"""

import dataclasses
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from replicator.base.types import PyTree
from replicator.errors import BatchError

_INT64 = np.iinfo(np.int64)
_NUMBERS = {int: np.int64, float: np.float64, bool: np.bool_}


def fit_of(value: PyTree) -> Hashable:
    """Return a key that is equal for two values exactly when they can be merged.

    Args:
      value: Arguments of one call.
    """
    parts = _parts(value)
    if parts is not None:
        return type(value), frozenset((name, fit_of(p)) for name, p in parts.items())
    if _is_array(value):
        return np.ndarray, value.shape, value.dtype
    if _is_number(value):
        return np.ndarray, type(value)
    return type(value)


def merge(values: Sequence[PyTree], *, size: int) -> PyTree:
    """Merge values of the same fit into one.

    Args:
      values: One of each call, at least one.
      size: Length of the new axis, or list: the first value is repeated.

    Returns:
      A value of the same structure; its arrays have a new first axis of `size`.
    """
    first = values[0]
    parts = _parts(first)
    if parts is not None:
        opened = [_parts(value) or {} for value in values]
        return _rebuilt(
            first, {n: merge([each[n] for each in opened], size=size) for n in parts}
        )
    if _is_array(first):
        return _stacked([np.asarray(value) for value in values], size)
    filled = [*values, *[first] * (size - len(values))]
    return np.array(filled, _NUMBERS[type(first)]) if _is_number(first) else filled


def split(result: PyTree, *, size: int, name: str, where: str = "") -> list[PyTree]:
    """Take the result of a merged call apart.

    Args:
      result: Result of the function for `size` calls.
      size: Number of rows that it must have.
      name: The function's, for the text of an error.
      where: The path of `result` inside what was returned, likewise.

    Returns:
      `size` values; rows of arrays are views.

    Raises:
      BatchError: A leaf has not one row for each call.
    """
    if result is None:
        return [None] * size
    if _is_array(result):
        rows = np.asarray(result)
        if rows.ndim == 0 or len(rows) != size:
            raise _unsplittable(f"an array of shape {rows.shape}", size, name, where)
        return [rows[row] for row in range(size)]
    if isinstance(result, list):
        if len(result) != size:
            raise _unsplittable(f"a list of {len(result)}", size, name, where)
        return result
    parts = _parts(result)
    if parts is None:
        raise _unsplittable(f"a {type(result).__name__}", size, name, where)
    columns = {
        key: split(part, size=size, name=name, where=f"{where}[{key!r}]")
        for key, part in parts.items()
    }
    return [
        _rebuilt(result, {key: column[row] for key, column in columns.items()})
        for row in range(size)
    ]


def _stacked(rows: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Copy each row once, into its place; the rest is the first again."""
    stacked = np.empty((size, *rows[0].shape), rows[0].dtype)
    for number, row in enumerate(rows):
        stacked[number] = row
    stacked[len(rows) :] = rows[0]
    return stacked


def _is_array(value: PyTree) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return True
    # JAX is asked only where the user has it; its random keys are not numbers.
    jax_array = getattr(sys.modules.get("jax"), "Array", ())
    return isinstance(value, jax_array) and isinstance(value.dtype, np.dtype)


def _is_number(value: PyTree) -> bool:
    if type(value) is int:
        return bool(_INT64.min <= value <= _INT64.max)
    return type(value) in _NUMBERS


def _parts(value: PyTree) -> Mapping[Any, PyTree] | None:
    """Return the parts of a container by name, None of anything else."""
    if isinstance(value, dict):
        return value
    if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return None


def _rebuilt(like: PyTree, parts: Mapping[Any, PyTree]) -> PyTree:
    """Put parts together to a container of the same type."""
    if isinstance(like, dict):
        return dict(parts)
    if isinstance(like, tuple):
        make: Callable[..., PyTree] = getattr(like, "_make", tuple)
        return make(parts.values())
    # Not by the constructor: what it checks of one call need not hold for many.
    made = object.__new__(type(like))
    for name, part in parts.items():
        object.__setattr__(made, name, part)
    return made


def _unsplittable(what: str, size: int, name: str, where: str) -> BatchError:
    return BatchError(
        f"`{name}` must return one row for each of its {size} merged calls, got {what} "
        f"at result{where}. Return arrays whose first axis is the calls, or lists."
    )
