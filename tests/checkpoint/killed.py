"""Save, and die before the n-th operation on the file system, for every n.

A program of its own, so that `tests/checkpoint/test_crash.py` may kill it. Each death
is that of a forked child, which has nothing to import; no thread is started before.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import tensorstore  # noqa: F401  (before a fork)

from replicator.checkpoint import CheckpointStore
from replicator.checkpoint.disk import Disk
from replicator.training.options import Retention
from tests.checkpoint.states import small_snapshot

_AT_ONCE = 2


class Killer:
    """Counts operations, and kills this process before the n-th."""

    def __init__(self, n):
        self._left = n

    def __call__(self, operation, path):
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def save_until_killed(directory, n, step=2):
    policy = Retention(keep_last=1)
    with CheckpointStore(directory, retention=policy, disk=Disk(Killer(n))) as store:
        store.save(small_snapshot(step))


def main(start, cases, stride, step):
    """Save in a copy of `start`, `cases/n`, for every so many n until none dies."""
    n, running, survived = 1, set(), False
    while not survived or running:
        while not survived and len(running) < _AT_ONCE:
            shutil.copytree(start, cases / str(n))
            child = os.fork()
            if child == 0:
                save_until_killed(cases / str(n), n, step)
                os._exit(0)
            running.add(child)
            n += stride
        child, status = os.wait()
        running.discard(child)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, -signal.SIGKILL), f"a child ended with {code}"
        survived |= code == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
