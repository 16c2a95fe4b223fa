"""Final metrics of a run as JSON: numbers, and arrays that are not large."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from replicator.base.host.strict_json import strict_json
from replicator.base.trees import leaf_path, nested
from replicator.base.types import PyTree
from replicator.writers.writer import NUMBERS

MOST_NUMBERS = 10_000
"""Arrays of more numbers are left out of results."""


def result_as_json(metrics: PyTree) -> list[dict[str, Any]]:
    """Return the metrics of a result as plain values; large arrays are left out.

    >>> result_from_json(result_as_json({"loss": np.float32(0.5)}))
    {'loss': 0.5}
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(metrics))
    arrays = [(path, np.asarray(leaf)) for path, leaf in flat]
    return [
        {
            "path": [leaf_path((entry,)) for entry in path],
            "dtype": str(array.dtype),
            "value": _plain(array),
        }
        for path, array in arrays
        if array.size <= MOST_NUMBERS and array.dtype.kind in NUMBERS
    ]


def result_from_json(leaves: Sequence[Mapping[str, Any]]) -> PyTree:
    """Return the result of `result_as_json` as nested dicts of numbers and arrays."""
    found = nested(
        (leaf["path"] or [""], _array(leaf["value"], leaf["dtype"])) for leaf in leaves
    )
    metrics = found[""] if list(found) == [""] else found
    return jax.tree.map(lambda leaf: leaf if leaf.ndim else leaf.item(), metrics)


def _plain(array: np.ndarray) -> Any:
    # JSON has no NaN; numbers of all widths pass through float64 unharmed.
    wide = array.astype(np.float64) if array.dtype.kind in "fV" else array
    return [strict_json(number) for number in wide.ravel().tolist()], list(array.shape)


def _array(value: Any, dtype: str) -> np.ndarray:
    numbers, shape = value
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if kind.kind in "iu":
        read = [int(number) for number in numbers]
    elif kind.kind == "b":
        read = [number == "true" for number in numbers]
    else:
        read = [float(number.strip('"')) for number in numbers]
    return np.asarray(read).astype(kind).reshape(shape)
