"""Pin processes to cores, where the system allows it.

A ping between two processes takes a third of the time when both share a core: nothing
is woken elsewhere. Left alone, the kernel's scheduler draws one of the two for each
pair, and may draw again at any time. So a ratio of two pairs compares two draws, unless
both are told where to run.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


class CorePair(NamedTuple):
    """A core for each of two processes."""

    server: int
    client: int


def two_cores() -> CorePair | None:
    """Return two cores that this process may use; None: there are none, or no way to.

    Two threads of one physical core do not count as two.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    first, *others = sorted(os.sched_getaffinity(0))
    taken = _siblings(first)
    apart = [core for core in others if taken is None or _siblings(core) != taken]
    return CorePair(first, apart[0]) if apart else None


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Run this thread, and what it starts, on one core while the block lasts.

    Args:
      core: Its number; None: wherever they could run before.
    """
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _siblings(core: int) -> str | None:
    try:
        return Path(_TOPOLOGY.format(core)).read_text()
    except OSError:
        return None
