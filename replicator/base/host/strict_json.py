"""Write JSON that every parser reads, also for NaN and infinity.

The standard has no NaN and no infinity, and Python writes them all the same. Here they
become the strings "NaN", "Infinity" and "-Infinity", which Python's `float` reads back.
"""

import json
import math
from collections.abc import Mapping

import numpy as np

from replicator.base.types import PyTree


def strict_json(value: PyTree, *, indent: int | None = None) -> str:
    """Return `value` as JSON; the `repr` of values that JSON cannot hold.

    >>> strict_json({"loss": float("nan"), "at": 3 + 1j})
    '{"loss": "NaN", "at": "(3+1j)"}'
    """
    return json.dumps(_plain(value), allow_nan=False, indent=indent)


def _plain(value: PyTree) -> PyTree:
    match value:
        case np.generic():
            return _plain(value.item())
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else _non_finite(value)
        case Mapping():
            return {str(name): _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return repr(value)


def _non_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
