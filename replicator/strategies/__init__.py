"""Strategies: how a step and its state are spread over devices, as data."""

from replicator.base.padded import Padded, unpadded
from replicator.strategies import autodist
from replicator.strategies.builders import (
    Rules,
    data_parallel,
    fsdp,
    hybrid,
    tensor_parallel,
    zero1,
    zero2,
)
from replicator.strategies.cluster_file import Host, Ssh
from replicator.strategies.cost import (
    Features,
    StepTime,
    forecast,
    predict,
)
from replicator.strategies.hardware import Hardware
from replicator.strategies.machine import Link, Machine
from replicator.strategies.rule import Rule
from replicator.strategies.strategy import Strategy
from replicator.strategies.table import table
from replicator.strategies.text import from_json, from_yaml, to_json, to_yaml
from replicator.strategies.traffic import Traffic
from replicator.strategies.variables import Variable, variables_made_by, variables_of

__all__ = [
    "Features",
    "Hardware",
    "Host",
    "Link",
    "Machine",
    "Padded",
    "Rule",
    "Rules",
    "Ssh",
    "StepTime",
    "Strategy",
    "Traffic",
    "Variable",
    "autodist",
    "data_parallel",
    "forecast",
    "from_json",
    "from_yaml",
    "fsdp",
    "hybrid",
    "predict",
    "table",
    "tensor_parallel",
    "to_json",
    "to_yaml",
    "unpadded",
    "variables_made_by",
    "variables_of",
    "zero1",
    "zero2",
]
