"""One program over islands of devices: functions on slices, traced into dataflows."""

from replicator.controller.controller import Controller, local
from replicator.controller.dataflow import Dataflow
from replicator.controller.functions import Function
from replicator.controller.future import Future
from replicator.controller.program import Program
from replicator.controller.scheduling.clients import DataflowClient
from replicator.controller.scheduling.timeline import OpSpan, Timeline
from replicator.controller.slices import Slice

__all__ = [
    "Controller",
    "Dataflow",
    "DataflowClient",
    "Function",
    "Future",
    "OpSpan",
    "Program",
    "Slice",
    "Timeline",
    "local",
]
