"""Which arrows to draw: many handles of a whole group are one arrow of its box.

every node of a group holds a handle of x     one arrow from the group to x
x holds a handle of every node of a group     one arrow from x to the group
both                                          one arrow between two groups
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from replicator.launchpad_bridge.graph import Edge, Graph


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Where an arrow begins or ends.

    Attributes:
      label: Of a group.
      name: One worker of it; None for all of it.
    """

    label: str
    name: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrow:
    """One line of the picture.

    Attributes:
      source: Who calls.
      target: Who is called.
      edges: The handles it stands for.
    """

    source: End
    target: End
    edges: Sequence[Edge]


def arrows_of(graph: Graph) -> list[Arrow]:
    """Return the arrows that show all edges of a graph, in a fixed order."""
    groups = {label: [v.name for v in group] for label, group in graph.groups().items()}
    label_of = {vertex.name: vertex.label for vertex in graph.vertices}
    between: dict[tuple[str, str], dict[tuple[str, str], list[Edge]]] = {}
    for edge in graph.edges:
        labels = label_of[edge.source], label_of[edge.target]
        pairs = between.setdefault(labels, {})
        pairs.setdefault((edge.source, edge.target), []).append(edge)
    arrows: list[Arrow] = []
    for (source, target), pairs in between.items():
        if source == target:
            arrows += _inside(source, groups[source], pairs)
        else:
            arrows += _across(source, target, groups, pairs)
    return arrows


_Pairs = Mapping[tuple[str, str], Sequence[Edge]]


def _inside(label: str, names: Sequence[str], pairs: _Pairs) -> list[Arrow]:
    """Return arrows between the workers of one group."""
    others = {(a, b) for a in names for b in names if a != b}
    if len(names) > 2 and others <= set(pairs):
        whole = End(label=label, name=None)
        return [Arrow(source=whole, target=whole, edges=_joined(pairs.values()))]
    return [_single(label, a, label, b, edges) for (a, b), edges in pairs.items()]


def _across(
    source: str, target: str, groups: Mapping[str, Sequence[str]], pairs: _Pairs
) -> list[Arrow]:
    """Return arrows from one group to another."""
    callers, called = groups[source], groups[target]
    left = dict(pairs)

    def take(wanted: list[tuple[str, str]], caller: End, callee: End) -> list[Arrow]:
        if len(wanted) < 2 or not all(pair in left for pair in wanted):
            return []
        edges = _joined(left.pop(pair) for pair in wanted)
        return [Arrow(source=caller, target=callee, edges=edges)]

    all_callers = _end(source, callers)
    all_called = _end(target, called)
    arrows = take([(a, b) for a in callers for b in called], all_callers, all_called)
    for b in called:
        into = [(a, b) for a in callers]
        arrows += take(into, all_callers, End(label=target, name=b))
    for a in callers:
        out = [(a, b) for b in called]
        arrows += take(out, End(label=source, name=a), all_called)
    arrows += [_single(source, a, target, b, edges) for (a, b), edges in left.items()]
    return arrows


def _end(label: str, names: Sequence[str]) -> End:
    """Return a whole group, which may be a single worker."""
    return End(label=label, name=names[0] if len(names) == 1 else None)


def _single(
    source: str, caller: str, target: str, called: str, edges: Sequence[Edge]
) -> Arrow:
    return Arrow(
        source=End(label=source, name=caller),
        target=End(label=target, name=called),
        edges=tuple(edges),
    )


def _joined(edges: Iterable[Sequence[Edge]]) -> tuple[Edge, ...]:
    return tuple(edge for some in edges for edge in some)
