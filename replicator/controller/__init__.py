"""One program over islands of devices: functions on slices, traced into dataflows."""

from replicator.controller.controller import Controller
from replicator.controller.dataflow import Dataflow
from replicator.controller.functions import Function
from replicator.controller.future import Future, read
from replicator.controller.islands.server import IslandServer
from replicator.controller.makers import connect, local, start
from replicator.controller.program import Program
from replicator.controller.slices import Slice

__all__ = [
    "Controller",
    "Dataflow",
    "Function",
    "Future",
    "IslandServer",
    "Program",
    "Slice",
    "connect",
    "local",
    "read",
    "start",
]
