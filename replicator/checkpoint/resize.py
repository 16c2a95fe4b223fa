"""Convert the values of n replicas to those of m replicas, by a leaf's `on_resize`.

The arithmetic runs in float64 on the host, and rounds once.
"""

import numpy as np

from replicator.checkpoint.manifest import LeafRecord
from replicator.errors import CheckpointMismatchError


def resize(
    array: np.ndarray, leaf: LeafRecord, *, num_replicas: int, on_resize: str
) -> np.ndarray:
    """Return the values of `num_replicas` new replicas, from those of the old ones.

    - `sum`: the new values have the sum of the old ones. Each is an equal share; for
      floats the last one also gets the rounding error, for integers the first ones get
      one more.
    - `mean`: each is the mean of the old values; integers are rounded to the nearest.
    - `first`: each is the value of the first old replica.

    >>> leaf = LeafRecord(parts=("seen",), dtype="int32", shape=(2,))
    >>> resize(np.array([4, 5]), leaf, num_replicas=4, on_resize="sum")
    array([3, 2, 2, 2])

    Args:
      array: Saved values [old replicas, ...]; for random keys their data.
      leaf: Record of the leaf.
      num_replicas: Number of new replicas.
      on_resize: `"sum"`, `"mean"`, `"first"` or `"refuse"`.

    Returns:
      Values of the same dtype: [num_replicas, ...].

    Raises:
      CheckpointMismatchError: The choice is `"refuse"`, or has no meaning for this
        leaf.
    """
    if on_resize == "first":
        return np.repeat(array[:1], num_replicas, axis=0)
    if on_resize == "refuse":
        raise CheckpointMismatchError(
            f"`{leaf.path}` must have the {leaf.shape[0]} replicas that it was saved "
            f"with, got {num_replicas}. Restore on as many, or declare what to do: "
            '`PerReplica(..., on_resize="sum")`, "mean" or "first".'
        )
    if leaf.key_impl is not None or array.dtype == bool:
        raise CheckpointMismatchError(
            f"`{leaf.path}` must hold numbers for `on_resize={on_resize!r}` on another "
            f'number of replicas, got {leaf}. Declare `on_resize="first"`.'
        )
    is_whole = np.issubdtype(array.dtype, np.integer) or leaf.dtype[:3] in (
        "int",
        "uin",
    )
    if on_resize == "mean":
        return _mean(array, num_replicas, is_whole=is_whole)
    return (_share_whole if is_whole else _share)(array, num_replicas)


def _mean(array: np.ndarray, num_replicas: int, *, is_whole: bool) -> np.ndarray:
    mean = _wide(array).mean(axis=0, keepdims=True)
    mean = np.rint(mean) if is_whole else mean
    return np.repeat(mean.astype(array.dtype), num_replicas, axis=0)


def _share(array: np.ndarray, num_replicas: int) -> np.ndarray:
    total = _wide(array).sum(axis=0)
    shares = np.repeat((total / num_replicas)[None], num_replicas, axis=0)
    shares = shares.astype(array.dtype)
    with np.errstate(invalid="ignore"):  # infinity minus infinity is NaN
        shares[-1] = (total - _wide(shares[:-1]).sum(axis=0)).astype(array.dtype)
    return shares


def _share_whole(array: np.ndarray, num_replicas: int) -> np.ndarray:
    # Python's integers do not overflow.
    total = array.astype(object).sum(axis=0)
    share, left = total // num_replicas, total % num_replicas
    shares = [share + (left > replica) for replica in range(num_replicas)]
    return (
        np.asarray(shares, dtype=object)
        .reshape(-1, *array.shape[1:])
        .astype(array.dtype)
    )


def _wide(array: np.ndarray) -> np.ndarray:
    return (
        array.astype(np.result_type(array.dtype, np.complex128))
        if np.iscomplexobj(array)
        else array.astype(np.float64)
    )
