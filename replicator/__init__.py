"""Write what one replica does; run it on many devices, with the same answer.

Inside a step: the collectives, `replica_id`, keys. Around it: `Replicator`. See README.
"""

from replicator import hooks, testing, writers
from replicator.averages import ema
from replicator.best_so_far import BestSoFar, Follow
from replicator.collectives.all_gather import all_gather
from replicator.collectives.all_reduce import all_reduce
from replicator.collectives.all_to_all import all_to_all
from replicator.collectives.assume_replicated import assume_replicated
from replicator.collectives.axes import num_replicas, replica_id
from replicator.collectives.broadcast import broadcast
from replicator.collectives.keys import example_keys, replica_key
from replicator.collectives.map_gather import map_gather, map_reduce
from replicator.collectives.microbatch import is_last_microbatch
from replicator.collectives.permute import permute
from replicator.collectives.reduce_scatter import reduce_scatter
from replicator.compiled_step import CompiledStep, RecompilationWarning
from replicator.evaluate import Evaluation
from replicator.evaluate_every import EvaluateEvery
from replicator.fake_devices import fake_devices, obey_environment
from replicator.inputs.context import InputContext
from replicator.inputs.options import InputOptions
from replicator.loss_scale import DynamicLossScale
from replicator.metrics import Max, Mean, Sum
from replicator.optimizer import scale_loss, wrap_optimizer
from replicator.optimizer_state import OptimizerState
from replicator.per_replica import PerReplica
from replicator.proof import SharedRandomKeyWarning
from replicator.replicator import Replicator, run
from replicator.version import __version__

__all__ = [
    "BestSoFar",
    "CompiledStep",
    "DynamicLossScale",
    "EvaluateEvery",
    "Evaluation",
    "Follow",
    "InputContext",
    "InputOptions",
    "Max",
    "Mean",
    "OptimizerState",
    "PerReplica",
    "RecompilationWarning",
    "Replicator",
    "SharedRandomKeyWarning",
    "Sum",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "assume_replicated",
    "broadcast",
    "ema",
    "example_keys",
    "fake_devices",
    "hooks",
    "is_last_microbatch",
    "map_gather",
    "map_reduce",
    "num_replicas",
    "permute",
    "reduce_scatter",
    "replica_id",
    "replica_key",
    "run",
    "scale_loss",
    "testing",
    "wrap_optimizer",
    "writers",
]

# The one effect of this import, and only where the environment asks for it: set later,
# it would come after a script's first array, and fail.
obey_environment()
