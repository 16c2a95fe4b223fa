"""Effects of faults on this process, a batch, a file, or one device's memory."""

import ctypes
import logging
import random
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from replicator.base.host.clock import SystemClock
from replicator.base.types import Device, PyTree
from replicator.checkpoint.commit import checkpoint_path, list_steps
from replicator.checkpoint.disk import walk_files
from replicator.engine.fingerprints.copies import copied, named_arrays
from replicator.errors import ArgumentError

_log = logging.getLogger(__name__)


def sleep_forever() -> None:
    """Never return; signals are still handled."""
    while True:
        threading.Event().wait(3600)


def hold_interpreter(seconds: float) -> None:
    """Keep the interpreter's lock, so that no other Python thread runs."""
    c_sleep = ctypes.PyDLL(None).usleep  # `PyDLL` keeps the interpreter's lock
    clock = SystemClock()
    deadline_s = clock.now_s() + seconds
    while (left_s := deadline_s - clock.now_s()) > 0:  # a signal cuts a sleep short
        c_sleep(ctypes.c_uint(int(left_s * 1e6) + 1))


def poison(batch: PyTree, replica: tuple[int, int] | None) -> PyTree:
    """Return a batch whose numbers are NaN, or those of one replica's part of it.

    Args:
      batch: Leaves [global_batch, ...].
      replica: The replica, and the number of replicas; None for all.

    >>> poison({"x": np.zeros(4)}, (1, 2))["x"]
    array([ 0.,  0., nan, nan])
    """

    def spoil(leaf: PyTree) -> PyTree:
        spoiled = np.array(leaf)
        if not np.issubdtype(spoiled.dtype, np.inexact):
            return leaf
        own, count = replica or (0, 1)
        size = len(spoiled) // count
        spoiled[own * size : (own + 1) * size] = np.nan
        return spoiled

    return jax.tree.map(spoil, batch)


def flip_bit(directory: Path, pick: random.Random) -> Path | None:
    """Flip one bit of the newest checkpoint; return the file, None if there is none."""
    steps = list_steps(directory)
    files = (
        [path for path in walk_files(checkpoint_path(directory, steps[-1]))]
        if steps
        else []
    )
    files = [path for path in files if path.stat().st_size]
    if not files:
        _log.warning("No checkpoint in %s to flip a bit of.", directory)
        return None
    chosen = pick.choice(files)
    place = pick.randrange(chosen.stat().st_size)
    with chosen.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << pick.randrange(8)]))
    return chosen


def flip_copied_bit(
    state: PyTree, replica: tuple[int, int] | None, pick: random.Random
) -> PyTree:
    """Return a state with one bit flipped in one device's copy of one leaf.

    Args:
      state: Arrays; leaves of random keys and those without a second copy are spared.
      replica: Place of the device among those of the mesh, and their number; None for
        one that `pick` picks.
      pick: Picks the leaf and the bit, the same in all processes.

    Raises:
      ArgumentError: There is another number of devices, or no leaf with copies.
    """
    leaves, structure = jax.tree.flatten(state)
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    meshes = [each.mesh for each in shardings if isinstance(each, NamedSharding)]
    assert isinstance(meshes[0], Mesh), "a run's state lies on its mesh"
    found = [
        leaf
        for leaf in copied(named_arrays(state), meshes[0])[0]
        if leaves[leaf.number].size
        and not jnp.issubdtype(leaves[leaf.number].dtype, jax.dtypes.prng_key)
    ]
    devices = list(meshes[0].devices.flat)
    own, count = replica or (pick.randrange(len(devices)), len(devices))
    if count != len(devices) or not found:
        raise ArgumentError(
            f"`replica` must be one of {len(devices)} devices with copies of a leaf, "
            f"got {own} of {count}. Count the devices of the mesh."
        )
    number = pick.choice(found).number
    leaves[number] = _flipped(leaves[number], devices[own], pick)
    return structure.unflatten(leaves)


def _flipped(leaf: jax.Array, device: Device, pick: random.Random) -> jax.Array:
    """Return an array with one bit flipped in the piece on a device, if it is here."""
    place = pick.random()  # the same in processes that do not hold the piece
    pieces = [shard.data for shard in leaf.addressable_shards]
    for number, piece in enumerate(pieces):
        if piece.devices() == {device}:
            damaged = np.array(piece)
            # The lowest bit of a byte: of a boolean there is no other.
            damaged.reshape(-1).view(np.uint8)[int(place * damaged.nbytes)] ^= 1
            pieces[number] = jax.device_put(damaged, piece.sharding)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces)
