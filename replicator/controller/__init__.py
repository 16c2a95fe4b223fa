"""One program over islands of devices: functions on slices, traced into dataflows."""

from replicator.controller.controller import Controller
from replicator.controller.dataflow import Dataflow
from replicator.controller.functions import Function
from replicator.controller.future import Future, read
from replicator.controller.islands.server import IslandServer
from replicator.controller.makers import connect, local, start
from replicator.controller.pipeline.pipeline import (
    Pipeline,
    PipelineState,
    PipelineUpdate,
)
from replicator.controller.pipeline.schedules import (
    Schedule,
    StageOp,
    gpipe,
    interleaved,
    one_f_one_b,
)
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
    "IslandServer",
    "OpSpan",
    "Pipeline",
    "PipelineState",
    "PipelineUpdate",
    "Program",
    "Schedule",
    "Slice",
    "StageOp",
    "Timeline",
    "connect",
    "gpipe",
    "interleaved",
    "local",
    "one_f_one_b",
    "read",
    "start",
]
