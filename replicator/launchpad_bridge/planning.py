"""Make the plan of a program: its workers, their addresses and functions."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from replicator.errors import ProgramError
from replicator.launchpad_bridge.addresses.promises import Address, RpcAddress
from replicator.launchpad_bridge.graph import (
    vertex_of,
    with_inner,
    worker_names,
)
from replicator.launchpad_bridge.graph_check import check_graph
from replicator.launchpad_bridge.launch_types import LaunchType
from replicator.launchpad_bridge.nodes.jax_processes import GroupMember
from replicator.launchpad_bridge.nodes.node import Node
from replicator.launchpad_bridge.nodes.processes_colocation import (
    MultiProcessingColocation,
)
from replicator.launchpad_bridge.program import Program
from replicator.launchpad_bridge.protocols import Executable, Plan, Resources, Restart
from replicator.launchpad_bridge.running.node_run import NodeRun, Target
from replicator.launchpad_bridge.running.python_process import resources_of
from replicator.monitoring.drawing.graph import GraphEdge
from replicator.rpc.codec.message_limits import MessageLimits

DESCRIPTION = "program.json"
"""File in the run's folder that describes the program, for tools."""
_THREADS = (LaunchType.LOCAL_MULTI_THREADING, LaunchType.TEST_MULTI_THREADING)


def make_plan(
    program: Program,
    *,
    run_id: str,
    folder: Path,
    logs: Path,
    launch_type: LaunchType | str,
    resources: Mapping[str, Any],
) -> Plan:
    """Check a program, bind its addresses, and plan each worker.

    Args:
      program: Program to run.
      run_id: Unique id of the run.
      folder: Private folder of the run.
      logs: Folder for the output of workers.
      launch_type: Launch type, for nodes that read it.
      resources: Needs of groups, by label, in place of those in the program.

    Raises:
      ProgramError: The program cannot run.
    """
    edges = check_graph(program)
    wanted = _wanted(program, resources)
    workers = worker_names(program.groups)
    for _, label, _, node in workers:
        _prepare(node, label, launch_type, wanted[label][0])
        if isinstance(node, GroupMember):
            node.plan_meeting(folder)
    limits = MessageLimits(trusted_memory=program.trusted_memory)
    colocations = {
        id(inner): node
        for node in program.get_all_nodes()
        if isinstance(node, MultiProcessingColocation)
        for inner in node.nodes
    }
    addresses = _bind(workers, run_id, folder, limits)
    targets = _targets(edges, addresses)
    executables = [
        _executable(
            (name, label, index, node),
            run_id=run_id,
            launch_type=launch_type,
            addresses=addresses[name],
            targets=targets.get(name, {}),
            wanted=wanted[label],
            restart=program.settings(label).restart or Restart(),
            colocation=colocations.get(id(node)),
        )
        for name, label, index, node in workers
    ]
    plan = Plan(
        program=program.name,
        run_id=run_id,
        folder=folder,
        logs=logs,
        executables=executables,
    )
    _describe(plan, edges)
    return plan


def all_addresses(program: Program) -> list[Address]:
    """Return the addresses of all nodes, each once."""
    nodes = program.get_all_nodes()
    found = {id(each): each for node in nodes for each in addresses_of(node)}
    return list(found.values())


def addresses_of(node: Any) -> Iterator[Address]:
    """Yield the addresses of a node and of those inside of it, some of them twice."""
    for part in with_inner(node):
        if isinstance(part, Node):
            yield from part.addresses


def _wanted(
    program: Program, resources: Mapping[str, Any]
) -> dict[str, tuple[Resources, Mapping[str, Any]]]:
    unknown = sorted(set(resources) - set(program.groups))
    if unknown:
        raise ProgramError(
            f"`resources` must name groups of {program.name!r} "
            f"({', '.join(program.groups)}), got {', '.join(unknown)}. Use these."
        )
    return {
        label: resources_of(
            label, resources.get(label, program.settings(label).resources)
        )
        for label in program.groups
    }


def _prepare(
    node: Any, label: str, launch_type: LaunchType | str, resources: Resources
) -> None:
    """Give a node, and those inside of it, their launch type and resources."""
    for part in with_inner(node):
        if isinstance(part, Node):
            part._initialize_context(launch_type, resources)
            part.collect_input_handles()
            for handle in part.input_handles:
                handle.connect(part, label)


def _bind(
    workers: Iterable[tuple[str, str, int, Any]],
    run_id: str,
    folder: Path,
    limits: MessageLimits,
) -> dict[str, list[str]]:
    """Bind all addresses; return those of `rpc` servers, by worker."""
    bound: set[int] = set()
    of_worker: dict[str, list[str]] = {}
    for name, _, _, node in workers:
        of_worker[name] = []
        for address in addresses_of(node):
            if id(address) in bound:
                continue
            number = len(bound)
            is_rpc = isinstance(address, RpcAddress)
            planned = (
                f"inproc:{run_id}-{number},unix:{folder}/{number}"
                if is_rpc
                else f"port:{run_id}-{number}"
            )
            bound.add(id(address))
            address.bind_planned(planned, name, limits)
            if is_rpc:
                of_worker[name].append(planned)
    return of_worker


def _targets(
    edges: Sequence[GraphEdge], addresses: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Target]]:
    """Return the workers that each worker calls, by address."""
    reached = _reached(edges)
    targets: dict[str, dict[str, Target]] = {}
    for edge in edges:
        calls_back = edge.source in reached.get(edge.target, ())
        target = Target(name=edge.target, calls_back=calls_back)
        for address in addresses[edge.target]:
            targets.setdefault(edge.source, {})[address] = target
    return targets


def _reached(edges: Iterable[GraphEdge]) -> dict[str, set[str]]:
    """Return all workers that each worker has a handle of, directly or not."""
    after: dict[str, set[str]] = {}
    for edge in edges:
        after.setdefault(edge.source, set()).add(edge.target)
    reached: dict[str, set[str]] = {}
    for start in after:
        found: set[str] = set()
        pending = [start]
        while pending:
            new = after.get(pending.pop(), set()) - found
            found |= new
            pending += new
        reached[start] = found
    return reached


def _executable(
    worker: tuple[str, str, int, Any],
    *,
    run_id: str,
    launch_type: LaunchType | str,
    addresses: Sequence[str],
    targets: Mapping[str, Target],
    wanted: tuple[Resources, Mapping[str, Any]],
    restart: Restart,
    colocation: MultiProcessingColocation | None,
) -> Executable:
    name, label, index, node = worker
    resources, flags = wanted
    is_member = isinstance(node, GroupMember)
    own_process = colocation is not None or getattr(node, "has_own_process", False)
    retries = 0 if colocation is None else colocation.num_retries_on_failure
    if retries:
        # Exactly so many, however long each ran.
        restart = Restart(attempts=retries, progress_s=math.inf, backoff_s=0.1)
    run = NodeRun(
        node=node,
        function=_function(node, label),
        name=name,
        run_id=run_id,
        resources=resources,
        targets=targets,
        launch_type=launch_type,
        # Threads share the flags of the process that launched them.
        flags=flags if own_process or launch_type not in _THREADS else {},
        own_process=own_process,
    )
    return Executable(
        label=label,
        index=index,
        name=name,
        run=run,
        addresses=tuple(addresses),
        resources=resources,
        restart=restart,
        is_member=is_member,
        retries=retries,
        ends_program=getattr(node, "ends_program", False),
    )


def _function(node: Any, label: str) -> Any:
    """Return the one function that a node's worker runs."""
    if not hasattr(node, "to_executables"):
        raise ProgramError(
            f"`node` must be one that a launcher can run, got {node!r} in {label!r}. "
            "Use a PyNode, or a subclass of Node with `to_executables`."
        )
    functions = node.to_executables(
        [node], label, getattr(node, "launch_context", None)
    )
    if len(functions) != 1:
        raise ProgramError(
            f"`to_executables` must return one function for one node, got "
            f"{len(functions)} of {node!r}. Return `[node.function]`."
        )
    return functions[0]


def _describe(plan: Plan, edges: Iterable[GraphEdge]) -> None:
    described = {
        "program": plan.program,
        "run_id": plan.run_id,
        "pid": os.getpid(),
        "logs": str(plan.logs),
        "workers": [_described(executable) for executable in plan.executables],
        "edges": [dataclasses.asdict(edge) for edge in edges],
    }
    (plan.folder / DESCRIPTION).write_text(json.dumps(described, indent=1))


def _described(executable: Executable) -> dict[str, Any]:
    node = getattr(executable.run, "node", None)
    shown = vertex_of(executable.name, executable.label, node)
    return {
        **dataclasses.asdict(shown),
        "index": executable.index,
        "node": repr(node),
        "addresses": list(executable.addresses),
    }
