"""The public names, each with its one home; `__init__.py` loads them when used."""

from . import (
    checkpoint,
    compat,
    controller,
    distributed,
    errors,
    exit_codes,
    hooks,
    options,
    strategies,
    testing,
    writers,
)
from .base.host.fake_devices import fake_devices
from .base.per_replica import PerReplica
from .base.version import __version__
from .collectives.all_gather import all_gather
from .collectives.all_reduce import all_reduce
from .collectives.all_to_all import all_to_all
from .collectives.assume_replicated import assume_replicated
from .collectives.broadcast import broadcast
from .collectives.context.axes import num_replicas, replica_id
from .collectives.context.keys import example_keys, example_places, replica_key
from .collectives.context.microbatch import is_last_microbatch, num_microbatches
from .collectives.context.step_number import step_number
from .collectives.map_gather import map_gather, map_reduce
from .collectives.permute import permute
from .collectives.reduce_scatter import reduce_scatter
from .engine.analysis.example_means import ExampleMeanWarning
from .engine.analysis.meeting import MicrobatchCollectiveWarning
from .engine.analysis.shared_noise import SharedRandomKeyWarning
from .engine.compiled_step import CompiledStep, RecompilationWarning
from .engine.evaluation.evaluate import Evaluation
from .engine.metrics.declared import Concat, Max, Mean, Min, Sum
from .engine.step.averages import ema
from .engine.step.donation import SharedBufferWarning
from .engine.step.gradients import LocalSum, global_loss, value_and_grad
from .engine.step.loss_scale import DynamicLossScale
from .engine.step.optimizer import wrap_optimizer
from .engine.step.optimizer_state import OptimizerState, scale_loss
from .inputs.context import InputContext
from .inputs.options import InputOptions
from .replicator import Replicator, choose, run
from .training.session import Session
from .tuning.topologies import devices_of

__all__ = [
    "CompiledStep",
    "Concat",
    "DynamicLossScale",
    "Evaluation",
    "ExampleMeanWarning",
    "InputContext",
    "InputOptions",
    "LocalSum",
    "Max",
    "Mean",
    "MicrobatchCollectiveWarning",
    "Min",
    "OptimizerState",
    "PerReplica",
    "RecompilationWarning",
    "Replicator",
    "Session",
    "SharedBufferWarning",
    "SharedRandomKeyWarning",
    "Sum",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "assume_replicated",
    "broadcast",
    "checkpoint",
    "choose",
    "compat",
    "controller",
    "devices_of",
    "distributed",
    "ema",
    "errors",
    "example_keys",
    "example_places",
    "exit_codes",
    "fake_devices",
    "global_loss",
    "hooks",
    "is_last_microbatch",
    "map_gather",
    "map_reduce",
    "num_microbatches",
    "num_replicas",
    "options",
    "permute",
    "reduce_scatter",
    "replica_id",
    "replica_key",
    "run",
    "scale_loss",
    "step_number",
    "strategies",
    "testing",
    "value_and_grad",
    "wrap_optimizer",
    "writers",
]
