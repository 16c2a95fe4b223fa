"""Collectives of a step's replicas: pure, traced, differentiable."""

from replicator.collectives.all_gather import all_gather
from replicator.collectives.all_reduce import all_reduce
from replicator.collectives.all_to_all import all_to_all
from replicator.collectives.assume_replicated import (
    ASSUME_REPLICATED,
    assume_replicated,
)
from replicator.collectives.broadcast import broadcast
from replicator.collectives.context.axes import num_replicas, replica_id
from replicator.collectives.context.keys import (
    example_keys,
    example_places,
    replica_key,
)
from replicator.collectives.context.microbatch import (
    is_last_microbatch,
    microbatch,
    num_microbatches,
)
from replicator.collectives.map_gather import map_gather, map_reduce
from replicator.collectives.ordered import add_in_order
from replicator.collectives.permute import permute, ring_pairs
from replicator.collectives.reduce_scatter import reduce_scatter

__all__ = [
    "ASSUME_REPLICATED",
    "add_in_order",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "assume_replicated",
    "broadcast",
    "example_keys",
    "example_places",
    "is_last_microbatch",
    "map_gather",
    "map_reduce",
    "microbatch",
    "num_microbatches",
    "num_replicas",
    "permute",
    "reduce_scatter",
    "replica_id",
    "replica_key",
    "ring_pairs",
]
