"""Graph of a program: its workers, and the handles between them.

`graph_of` reads a program that may be half written, so it refuses nothing; a graph that
cannot run is refused by `graph_check`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from replicator.launchpad_bridge.handles import NoHandle
from replicator.launchpad_bridge.nodes.node import Node
from replicator.monitoring.drawing.graph import Graph, GraphEdge, Vertex


class _Program(Protocol):
    # `Program`, in whose file `graph_of` is imported.
    @property
    def name(self) -> str: ...
    @property
    def groups(self) -> Mapping[str, list[Any]]: ...


def graph_of(program: _Program) -> Graph:
    """Return the graph of a program; handles of nodes elsewhere are left out.

    >>> program = lp.Program("training")
    >>> learner = program.add_node(lp.CourierNode(Learner), label="learner")
    >>> _ = program.add_node(lp.PyNode(print, learner), label="actor")
    >>> [str(edge) for edge in graph_of(program).edges]
    ['actor -> learner']
    """
    workers = worker_names(program.groups)
    owners = {
        id(part): name for name, _, _, node in workers for part in with_inner(node)
    }
    edges = [
        GraphEdge(source=name, target=owners[id(handle.node)], argument=argument)
        for name, _, _, node in workers
        for part in with_inner(node)
        if isinstance(part, Node)
        for argument, handle in part.inputs()
        if not isinstance(handle, NoHandle) and id(handle.node) in owners
    ]
    vertices = [vertex_of(name, label, node) for name, label, _, node in workers]
    return Graph(program=program.name, vertices=vertices, edges=edges)


def vertex_of(name: str, label: str, node: Any) -> Vertex:
    """Return a worker as a vertex of the graph."""
    text = str(getattr(node, "description", ""))
    return Vertex(name=name, label=label, kind=type(node).__name__, text=text)


def worker_names(groups: Mapping[str, list[Any]]) -> list[tuple[str, str, int, Any]]:
    """Return (name, label, index, node) of each worker.

    >>> [name for name, *_ in worker_names({"learner": ["a"], "actors": ["b", "c"]})]
    ['learner', 'actors/0', 'actors/1']
    """
    expanded = {
        label: [worker for node in nodes for worker in _workers(node)]
        for label, nodes in groups.items()
    }
    return [
        (
            f"{label}/{index}" if len(nodes) > 1 or _is_numbered(node) else label,
            *(label, index, node),
        )
        for label, nodes in expanded.items()
        for index, node in enumerate(nodes)
    ]


def _is_numbered(node: Any) -> bool:
    return getattr(node, "is_numbered", False)


def _workers(node: Any) -> list[Any]:
    """Return the nodes that have a worker each in place of this one: mostly itself."""
    return node.inner_nodes if getattr(node, "is_expanded", False) else [node]


def with_inner(node: Any) -> Iterator[Any]:
    """Yield a node and those that run inside of it."""
    yield node
    if isinstance(node, Node):
        for inner in node.inner_nodes:
            yield from with_inner(inner)
