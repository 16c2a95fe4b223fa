"""Programs of service nodes, on threads, processes or a cluster.

    import replicator.launchpad_bridge as lp

    program = lp.Program("sum")
    adder = program.add_node(lp.CourierNode(Adder), label="adder")
    program.add_node(lp.CourierNode(Caller, adder), label="caller")
    lp.launch(program, launch_type="processes").wait()

The names are Launchpad's, and what it promises holds here.
"""

import importlib
from typing import TYPE_CHECKING, Any

from replicator.distributed.processes.driver import Worker
from replicator.errors import (
    LaunchError,
    NodeFailedError,
    ProgramError,
    RunTimeoutError,
)
from replicator.launchpad_bridge import recipes
from replicator.launchpad_bridge.addresses import promises as address
from replicator.launchpad_bridge.addresses.builders import (
    AbstractAddressBuilder,
    AddressBook,
    SimpleLocalAddressBuilder,
)
from replicator.launchpad_bridge.addresses.promises import (
    Address,
    bind_addresses,
    get_port_from_address,
)
from replicator.launchpad_bridge.batched_handler import batched_handler
from replicator.launchpad_bridge.handles import (
    Dereferenceable,
    Handle,
    extract_handles,
    maybe_dereference,
)
from replicator.launchpad_bridge.launch import launch
from replicator.launchpad_bridge.launch_types import (
    LaunchType,
    is_local_launch,
    is_local_launch_or_test,
)
from replicator.launchpad_bridge.launchers.piped_worker import PipedWorker
from replicator.launchpad_bridge.launchers.processes import Processes
from replicator.launchpad_bridge.launchers.test_mode import TestMode
from replicator.launchpad_bridge.launchers.threads import Threads
from replicator.launchpad_bridge.nodes.cacher_node import CacherNode
from replicator.launchpad_bridge.nodes.courier_node import CourierHandle, CourierNode
from replicator.launchpad_bridge.nodes.jax_processes import JaxProcesses
from replicator.launchpad_bridge.nodes.node import Node
from replicator.launchpad_bridge.nodes.processes_colocation import (
    MultiProcessingColocation,
)
from replicator.launchpad_bridge.nodes.py_node import PyClassNode, PyNode
from replicator.launchpad_bridge.nodes.threads_colocation import (
    MultiThreadingColocation,
)
from replicator.launchpad_bridge.program import Program, make_program
from replicator.launchpad_bridge.protocols import (
    Executable,
    Exited,
    Launcher,
    NodeContext,
    Plan,
    Resources,
    Restart,
    StopAsked,
    Workers,
)
from replicator.launchpad_bridge.replay.rate_limiter import RateLimiter
from replicator.launchpad_bridge.replay.samplers import (
    fifo,
    lifo,
    prioritised,
    uniform,
)
from replicator.launchpad_bridge.run import Run
from replicator.launchpad_bridge.running import node_context as context
from replicator.launchpad_bridge.running.deferred import Deferred
from replicator.launchpad_bridge.running.node_context import make_program_stopper, stop
from replicator.launchpad_bridge.running.node_run import run_worker
from replicator.launchpad_bridge.running.python_process import (
    DockerConfig,
    PythonProcess,
)
from replicator.launchpad_bridge.running.stopping import (
    register_stop_handler,
    stop_event,
    unregister_stop_handler,
    wait_for_stop,
)
from replicator.launchpad_bridge.trajectories.trajectory_queue import TrajectoryQueue
from replicator.launchpad_bridge.trajectories.trajectory_turns import TrajectoryTurns
from replicator.rpc.client.client import Client as CourierClient
from replicator.rpc.client.client import list_methods

if TYPE_CHECKING:
    from replicator.launchpad_bridge.acting.actor import Actor
    from replicator.launchpad_bridge.acting.inference import InferenceServer
    from replicator.launchpad_bridge.acting.items import n_step, sequences
    from replicator.launchpad_bridge.compat.reverb_node import ReverbNode
    from replicator.launchpad_bridge.learner.node import ReplicatedLearnerNode
    from replicator.launchpad_bridge.nodes.island_node import IslandNode
    from replicator.launchpad_bridge.replay.replay_table import ReplayTable

# A program without these does not wait for JAX and the replicator.
_LOADED_WHEN_USED = {
    "Actor": "acting.actor",
    "InferenceServer": "acting.inference",
    "IslandNode": "nodes.island_node",
    "ReplayTable": "replay.replay_table",
    "ReplicatedLearnerNode": "learner.node",
    "ReverbNode": "compat.reverb_node",
    "n_step": "acting.items",
    "sequences": "acting.items",
}


def __getattr__(name: str) -> Any:
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LOADED_WHEN_USED[name]}")
    return getattr(module, name)


__all__ = [
    "AbstractAddressBuilder",
    "Actor",
    "Address",
    "AddressBook",
    "CacherNode",
    "CourierClient",
    "CourierHandle",
    "CourierNode",
    "Deferred",
    "Dereferenceable",
    "DockerConfig",
    "Executable",
    "Exited",
    "Handle",
    "InferenceServer",
    "IslandNode",
    "JaxProcesses",
    "LaunchError",
    "LaunchType",
    "Launcher",
    "MultiProcessingColocation",
    "MultiThreadingColocation",
    "Node",
    "NodeContext",
    "NodeFailedError",
    "PipedWorker",
    "Plan",
    "Processes",
    "Program",
    "ProgramError",
    "PyClassNode",
    "PyNode",
    "PythonProcess",
    "RateLimiter",
    "ReplayTable",
    "ReplicatedLearnerNode",
    "Resources",
    "Restart",
    "ReverbNode",
    "Run",
    "RunTimeoutError",
    "SimpleLocalAddressBuilder",
    "StopAsked",
    "TestMode",
    "Threads",
    "TrajectoryQueue",
    "TrajectoryTurns",
    "Worker",
    "Workers",
    "address",
    "batched_handler",
    "bind_addresses",
    "context",
    "extract_handles",
    "fifo",
    "get_port_from_address",
    "is_local_launch",
    "is_local_launch_or_test",
    "launch",
    "lifo",
    "list_methods",
    "make_program",
    "make_program_stopper",
    "maybe_dereference",
    "n_step",
    "prioritised",
    "recipes",
    "register_stop_handler",
    "run_worker",
    "sequences",
    "stop",
    "stop_event",
    "uniform",
    "unregister_stop_handler",
    "wait_for_stop",
]
