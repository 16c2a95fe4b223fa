"""Refuse a graph that cannot run, before anything of it runs; return its edges.

labels        fit for the names of workers and of their log files
nodes         each is in one place of one program
handles       each is of a node of this program
constructors  no circle of nodes, each an argument of the next
"""

import graphlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from replicator.errors import ProgramError
from replicator.launchpad_bridge.graph import (
    graph_of,
    with_inner,
    worker_names,
)
from replicator.launchpad_bridge.handles import Handle, NoHandle
from replicator.launchpad_bridge.nodes.jax_processes import JaxProcesses
from replicator.launchpad_bridge.nodes.node import Node
from replicator.launchpad_bridge.nodes.processes_colocation import (
    MultiProcessingColocation,
)
from replicator.launchpad_bridge.program import Program
from replicator.monitoring.drawing.graph import GraphEdge

_LABEL = re.compile(r"\w[\w .:+=@,()-]{0,99}")


def check_graph(program: Program) -> Sequence[GraphEdge]:
    """Return the edges of a program that can run.

    Raises:
      ProgramError: It cannot run; the message names the nodes.
    """
    if not program.get_all_nodes():
        raise ProgramError(
            f"`program` must hold a node, got {program.name!r} without one. Add one "
            "with `program.add_node(node, label=...)`."
        )
    for label in program.groups:
        _check_label(label)
    for node in program.get_all_nodes():
        if isinstance(node, MultiProcessingColocation):
            node.check_nodes()
        if isinstance(node, JaxProcesses):
            _check_alone(program, node)
    workers = worker_names(program.groups)
    owners = _owners(program, workers)
    _check_cycles(_links(program, workers, owners), owners)
    return graph_of(program).edges


def _check_label(label: str) -> None:
    if not _LABEL.fullmatch(label):
        raise ProgramError(
            f"`label` must be at most 100 letters, digits and ' _.:+=@,()-', and begin "
            f"with a letter or a digit, got {label!r}: workers and logs bear it. "
            "Use 'actors'."
        )


def _check_alone(program: Program, node: JaxProcesses) -> None:
    """Refuse a second node in the group of processes that fail and restart as one."""
    for label, nodes in program.groups.items():
        if node in nodes and len(nodes) > 1:
            raise ProgramError(
                f"`JaxProcesses` must have a label of their own, got {label!r} of "
                f"{program.name!r} with {len(nodes)} nodes. Add each under another "
                "label."
            )


def _owners(
    program: Program, workers: Iterable[tuple[str, str, int, Any]]
) -> dict[int, str]:
    """Return the worker of each node, inner ones too, by identity."""
    owners: dict[int, str] = {}
    for name, _, _, node in workers:
        if isinstance(node, Node) and node.owner and node.owner[0] is not program:
            raise ProgramError(
                f"A node must be added to one program, got {name!r} of "
                f"{program.name!r} in the program {node.owner[0].name!r} too. Make "
                "another node for that."
            )
        for part in with_inner(node):
            if id(part) in owners:
                raise ProgramError(
                    f"A node must be added once, got {part!r} in {owners[id(part)]!r} "
                    f"and again in {name!r} of {program.name!r}. Make another node; a "
                    "colocation adds its inner nodes itself."
                )
            owners[id(part)] = name
    return owners


def _links(
    program: Program,
    workers: Iterable[tuple[str, str, int, Any]],
    owners: Mapping[int, str],
) -> Iterator[tuple[Node[Any], Any]]:
    """Yield each node with each node that it has a handle of."""
    for name, _, _, node in workers:
        for part in with_inner(node):
            if not isinstance(part, Node):
                continue
            for path, handle in _inputs(part, name):
                # `NoHandle` has no methods; one without a node is the user's own class.
                if isinstance(handle, NoHandle) or handle.node is None:
                    continue
                if id(handle.node) not in owners:
                    raise ProgramError(_foreign(program, name, path, handle.node))
                yield part, handle.node


def _inputs(node: Node[Any], name: str) -> list[tuple[str, Handle[Any]]]:
    try:
        return list(node.inputs())
    except ValueError as error:
        raise ProgramError(
            f"The arguments of {name!r} cannot be read: {error}"
        ) from error


def _foreign(program: Program, name: str, path: str, target: Any) -> str:
    owner = getattr(target, "owner", None)
    where = f"{path} of {name!r}"
    if owner is None:
        return (
            f"A handle must be of a node of {program.name!r}, got one of {target!r}, "
            f"which was added to no program, in {where}. Add that node, too."
        )
    other, label = owner
    return (
        f"A handle must be of a node of {program.name!r}, got one of {label!r} of "
        f"{'the other program ' if other is not program else ''}{other.name!r} in "
        f"{where}. Put both nodes into one program."
    )


def _check_cycles(
    links: Iterable[tuple[Node[Any], Any]], owners: Mapping[int, str]
) -> None:
    """Raise if nodes form a circle, and none was given its handles by `configure`."""
    after: dict[int, list[int]] = {}
    nodes: dict[int, Any] = {}
    for source, target in links:
        nodes |= {id(source): source, id(target): target}
        if not source.is_configured:
            after.setdefault(id(source), []).append(id(target))
    try:
        graphlib.TopologicalSorter(after).prepare()
    except graphlib.CycleError as error:
        # Each of these is an argument of the next, and the first stands at the end.
        cycle = error.args[1][::-1]
    else:
        return
    names = [
        owners[number] if nodes[number].owner else f"{owners[number]} {nodes[number]!r}"
        for number in cycle
    ]
    raise ProgramError(
        f"Constructors must not form a circle, got {' -> '.join(names)}: each is an "
        "argument of the one before. Make the nodes without these handles, take their "
        f"handles, and give them to {names[0]!r} with `node.configure(...)`."
    )
