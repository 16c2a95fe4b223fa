"""Effects of faults on this process, a batch, or a file."""

import ctypes
import logging
import random
import threading
from pathlib import Path

import jax
import numpy as np

from replicator.base.host.clock import SystemClock
from replicator.base.types import PyTree
from replicator.checkpoint.commit import checkpoint_path, list_steps
from replicator.checkpoint.disk import walk_files

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
