"""Strategies: how a step and its state are spread over devices, as data."""

from replicator.base.padded import Padded, unpadded
from replicator.strategies.builders import (
    Rules,
    data_parallel,
    fsdp,
    hybrid,
    tensor_parallel,
    zero1,
    zero2,
)
from replicator.strategies.rule import Rule
from replicator.strategies.strategy import Strategy
from replicator.strategies.table import table
from replicator.strategies.text import from_json, from_yaml, to_json, to_yaml
from replicator.strategies.variables import Variable, variables_made_by, variables_of

__all__ = [
    "Padded",
    "Rule",
    "Rules",
    "Strategy",
    "Variable",
    "data_parallel",
    "from_json",
    "from_yaml",
    "fsdp",
    "hybrid",
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
