"""Functions of `flax.jax_utils` and `flax.training.common_utils` for training loops.

    from replicator.compat import jax_utils                  # was: from flax
    from replicator.compat import jax_utils as common_utils  # was: from flax.training

Flax still has some of these. Here a replicated value is never whole on one device,
`unreplicate` runs no program over all of them, and batches are read ahead in a thread
of their own, with a bound on every wait.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from replicator.base.types import Device, Key, PyTree
from replicator.compat.layout import axis_mesh, axis_sharding, first_row
from replicator.compat.replicas import ROWS, device_put_replicated
from replicator.errors import ArgumentError, check_count
from replicator.inputs.prefetch import Prefetcher


def replicate(tree: PyTree, devices: Sequence[Device] | None = None) -> PyTree:
    """Put a copy of each leaf on each device.

    Args:
      tree: Any pytree of arrays or numbers.
      devices: The devices; by default all of this process.

    Returns:
      The tree with a leading device axis; each leaf is one array over the devices.

    >>> replicate({"w": jnp.ones(3)}, jax.devices()[:2])["w"].shape
    (2, 3)
    """
    return device_put_replicated(tree, _here(devices))


def unreplicate(tree: PyTree) -> PyTree:
    """Return the first device's row of each leaf, from that device.

    >>> unreplicate(replicate(jnp.arange(3), jax.devices()[:2])).tolist()
    [0, 1, 2]
    """
    return jax.tree.map(first_row, tree)


def shard(xs: PyTree) -> PyTree:
    """Cut the leading axis into one row for each device of this process.

    Args:
      xs: Leaves [host_batch, ...].

    Returns:
      Leaves [devices, host_batch / devices, ...].

    Raises:
      ArgumentError: A leaf does not divide.
    """
    count = jax.local_device_count()

    def cut(leaf: Any) -> Any:
        if not np.ndim(leaf) or leaf.shape[0] % count:
            raise ArgumentError(
                f"`xs` must divide evenly over {count} devices, got shape "
                f"{np.shape(leaf)}. Drop the remainder, or use `pad_shard_unpad`."
            )
        return leaf.reshape((count, leaf.shape[0] // count, *leaf.shape[1:]))

    return jax.tree.map(cut, xs)


def shard_prng_key(prng_key: Key) -> Key:
    """Split a random key into one for each device of this process."""
    return jax.random.split(prng_key, jax.local_device_count())


def get_metrics(device_metrics: Sequence[PyTree]) -> PyTree:
    """Fetch the metrics of many steps, and stack them.

    Args:
      device_metrics: A tree for each step; leaves have a leading device axis, along
        which they are equal.

    Returns:
      One tree of NumPy arrays [steps, ...].
    """
    fetched = jax.device_get([unreplicate(metrics) for metrics in device_metrics])
    return stack_forest(fetched)


def stack_forest(forest: Sequence[PyTree]) -> PyTree:
    """Stack trees of NumPy arrays into one tree, along a new first axis.

    >>> stack_forest([{"loss": 1.0}, {"loss": 2.0}])["loss"].tolist()
    [1.0, 2.0]
    """
    return jax.tree.map(lambda *leaves: np.stack(leaves), *forest)


def onehot(
    labels: jax.Array, num_classes: int, on_value: float = 1.0, off_value: float = 0.0
) -> jax.Array:
    """Return [..., num_classes]: `on_value` at each label, else `off_value`.

    >>> onehot(jnp.array([0, 2]), 3).tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    hot = jax.nn.one_hot(labels, num_classes, dtype=np.float32)
    return hot * (on_value - off_value) + off_value


def prefetch_to_device(
    iterator: Iterable[PyTree],
    size: int,
    devices: Sequence[Device] | None = None,
    *,
    timeout_s: float = 600.0,
) -> Prefetcher[PyTree]:
    """Read batches ahead, onto the devices.

    Args:
      iterator: Yields trees with a leading device axis: see `shard`. A thread reads it.
      size: Number of batches kept ready on the devices, at least 1.
      devices: The devices; by default all of this process.
      timeout_s: Longest wait for one batch, in seconds.

    Returns:
      An iterator of the same trees, each row on its device.

    Raises:
      ArgumentError: `size` is below 1.
    """
    check_count("size", size)
    sharding = axis_sharding(axis_mesh(ROWS, tuple(_here(devices))), 0)
    placed = (jax.device_put(batch, sharding) for batch in iterator)
    return Prefetcher(placed, size=size, timeout_s=timeout_s)


def pad_shard_unpad(
    wrapped: Callable[..., PyTree],
    static_argnums: Sequence[int] = (0,),
    static_argnames: Sequence[str] = (),
    static_return: bool = False,
) -> Callable[..., PyTree]:
    """Let a mapped function take batches that do not divide over the devices.

    Args:
      wrapped: A function mapped by `pmap`: leaves [devices, rows, ...] in and out.
      static_argnums: Positions of arguments passed as they are: parameters.
      static_argnames: Names of such keyword arguments.
      static_return: Whether the result is returned as it is. The padding, zeros, then
        counts: `rep.evaluate` masks it.

    Returns:
      A function of leaves [host_batch, ...], which returns NumPy arrays of that length.
      It takes `min_device_batch=n`, so that a small last batch compiles nothing.
    """

    @functools.wraps(wrapped)
    def padded(*args: Any, min_device_batch: int = 1, **kwargs: Any) -> PyTree:
        batch = (
            {i: arg for i, arg in enumerate(args) if i not in static_argnums},
            {name: arg for name, arg in kwargs.items() if name not in static_argnames},
        )
        examples = _common_length(batch)
        rows = max(-(-examples // jax.local_device_count()), min_device_batch)
        cut, named = jax.tree.map(functools.partial(_pad, rows=rows), batch)
        whole = [cut.get(i, arg) for i, arg in enumerate(args)]
        result = wrapped(*whole, **(kwargs | named))
        if static_return:
            return result
        return jax.tree.map(
            lambda leaf: leaf.reshape((-1, *leaf.shape[2:]))[:examples],
            jax.device_get(result),
        )

    return padded


def _here(devices: Sequence[Device] | None) -> Sequence[Device]:
    return jax.local_devices() if devices is None else devices


def _common_length(batch: PyTree) -> int:
    lengths = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batch)}
    if len(lengths) != 1:
        raise ArgumentError(
            "Arguments must have one number of examples, got "
            f"{sorted(lengths) or 'none'}. Name others in `static_argnums`."
        )
    return lengths.pop()


def _pad(leaf: Any, *, rows: int) -> np.ndarray:
    whole = np.asarray(leaf)
    devices = jax.local_device_count()
    missing = devices * rows - len(whole)
    zeros = np.zeros((missing, *whole.shape[1:]), whole.dtype)
    return np.concatenate([whole, zeros]).reshape((devices, rows, *whole.shape[1:]))
