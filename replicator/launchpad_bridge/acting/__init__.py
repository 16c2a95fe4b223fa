"""Environments, and actors that act in them.

    environments         interface for actors: `VectorEnvironment`, next-step autoreset
    vector_env           a vectorised environment of gymnasium
    serial_environments  plain environments of gymnasium or dm_env
    environment_state    the state of an environment; snapshots: as bytes
    unroll               steps into trajectories
    items                rows of a replay table, made of unrolls
    actor                unrolls, inserts, and outlives learner and table
    local_inference      the policy on the actor's own processor
    pulled_inference     the same, with variables pulled from a learner
    inference            a node that runs the policy for many actors
    waiting              calls of nodes that may be restarted

A loop in one process and the actors of a program act by the same `unroll`.
"""

from replicator.launchpad_bridge.acting.actor import Actor
from replicator.launchpad_bridge.acting.environments import (
    EnvironmentFailedError,
    Step,
    VectorEnvironment,
)
from replicator.launchpad_bridge.acting.inference import InferenceServer
from replicator.launchpad_bridge.acting.items import Items, n_step, sequences
from replicator.launchpad_bridge.acting.local_inference import LocalInference, Policy
from replicator.launchpad_bridge.acting.serial_environments import (
    from_dm_env,
    from_gymnasium_envs,
)
from replicator.launchpad_bridge.acting.unroll import (
    Acting,
    Unrolled,
    environment_seed,
    start,
    unroll,
)
from replicator.launchpad_bridge.acting.vector_env import from_gymnasium

__all__ = [
    "Acting",
    "Actor",
    "EnvironmentFailedError",
    "InferenceServer",
    "Items",
    "LocalInference",
    "Policy",
    "Step",
    "Unrolled",
    "VectorEnvironment",
    "environment_seed",
    "from_dm_env",
    "from_gymnasium",
    "from_gymnasium_envs",
    "n_step",
    "sequences",
    "start",
    "unroll",
]
