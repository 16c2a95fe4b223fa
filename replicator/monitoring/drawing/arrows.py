"""Arrows of a picture: many handles of a whole group are one arrow of its box.

every node of a group holds a handle of x     one arrow from the group to x
x holds a handle of every node of a group     one arrow from x to the group
both                                          one arrow between two groups
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from replicator.monitoring.drawing.graph import Graph, GraphEdge


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Beginning or end of an arrow.

    Attributes:
      label: Label of a group.
      name: Name of one worker of it; None for all of it.
    """

    label: str
    name: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrow:
    """One line of the picture.

    Attributes:
      source: Callers.
      target: Workers that are called.
      edges: Handles that it shows.
    """

    source: End
    target: End
    edges: Sequence[GraphEdge]


def arrows_of(graph: Graph) -> list[Arrow]:
    """Return the arrows that show all edges of a graph, in a fixed order."""
    groups = {label: [v.name for v in group] for label, group in graph.groups().items()}
    label_of = {vertex.name: vertex.label for vertex in graph.vertices}
    between: dict[tuple[str, str], dict[tuple[str, str], list[GraphEdge]]] = {}
    for edge in graph.edges:
        labels = label_of[edge.source], label_of[edge.target]
        pairs = between.setdefault(labels, {})
        pairs.setdefault((edge.source, edge.target), []).append(edge)
    return [
        arrow
        for (source, target), pairs in between.items()
        for arrow in _arrows(source, target, groups, pairs)
    ]


def _arrows(
    source: str,
    target: str,
    groups: Mapping[str, Sequence[str]],
    pairs: Mapping[tuple[str, str], Sequence[GraphEdge]],
) -> Iterator[Arrow]:
    """Yield arrows from one group to another, or inside of one; whole groups first."""
    left = dict(pairs)
    callers, called = [*_ends(source, groups)], [*_ends(target, groups)]
    if source == target and len(callers) > 1:
        (whole, names), *callers = callers
        called = callers
        others = {(a, b) for a in names for b in names if a != b}
        if len(names) > 2 and others <= left.keys():
            yield Arrow(source=whole, target=whole, edges=_joined(left.values()))
            return
    for (caller, sources), (callee, targets) in itertools.product(callers, called):
        wanted = [(a, b) for a in sources for b in targets]
        if all(pair in left for pair in wanted):
            edges = _joined(left.pop(pair) for pair in wanted)
            yield Arrow(source=caller, target=callee, edges=edges)


def _ends(
    label: str, groups: Mapping[str, Sequence[str]]
) -> Iterator[tuple[End, Sequence[str]]]:
    """Yield a whole group, and each of its workers, with their names."""
    names = groups[label]
    if len(names) > 1:
        yield End(label=label, name=None), names
    for name in names:
        yield End(label=label, name=name), [name]


def _joined(edges: Iterable[Sequence[GraphEdge]]) -> Sequence[GraphEdge]:
    return tuple(edge for some in edges for edge in some)
