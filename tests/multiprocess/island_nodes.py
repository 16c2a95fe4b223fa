"""What the nodes of a program run that computes on islands of other nodes."""

import os
import signal
from pathlib import Path

import numpy as np

import replicator.launchpad_bridge as lp
from replicator import controller
from replicator.errors import IslandLostError
from tests.multiprocess.worker_nodes import tell

CPU = lp.Resources(env={"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"})
ONES = np.ones(2, np.float32)
LIMIT_S = 120


class ToldIsland(lp.IslandNode):
    """An island that tells which process it is."""

    def __init__(self, path, *, devices):
        self.path = path
        super().__init__(devices=devices)

    def run(self):
        tell(self.path, os.getpid())
        super().run()


def computed(pw):
    """Return a value that went over two islands, of two devices and of one."""
    twice = pw.fn(lambda x: x * 2, pw.slice(2, island="island0"))
    more = pw.fn(lambda x: x + 1, pw.slice(1, island="island1"))
    return pw.program(lambda x: more(twice(x)))(ONES).result(LIMIT_S).tolist()


def compute(islands):
    """Compute over islands, and end the program."""
    with controller.connect(islands, lost_after_s=300) as pw:
        found = computed(pw)
    lp.stop()
    return found


def outlive(islands, path):
    """Kill the first island; return what is said of it, and values before and after."""
    found = []
    with controller.connect(islands, lost_after_s=300) as pw:
        found.append(computed(pw))
        kept = pw.put(ONES, pw.slice(2, island="island0"))
        os.kill(int(Path(path).read_text()), signal.SIGKILL)
        try:
            pw.fn(lambda x: x, kept.slice)(kept).result(LIMIT_S)
        except IslandLostError as error:
            found.append(str(error))
    # It was started again, and is free.
    with controller.connect(islands, lost_after_s=300) as pw:
        found.append(computed(pw))
    lp.stop()
    return found
