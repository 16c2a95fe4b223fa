"""What is drawn: vertices in groups, and the edges between them.

A program of workers, grouped by label, with the handles that they hold; or a dataflow
of ops, grouped by slice, with the values that they pass on.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GraphEdge:
    """An arrow: a handle among the arguments of a node, or a value of a dataflow.

    Attributes:
      source: The worker that holds the handle, and calls; or the op that makes a value.
      target: The worker that it calls; or the op that takes the value.
      argument: Path of the handle ("args[0]"), or the value ("float32[8]").
    """

    source: str
    target: str
    argument: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Vertex:
    """A worker or an op, as it is shown.

    Attributes:
      name: "label", or "label/index" where the group has several, or processes.
      label: Label of its group.
      kind: Type of its node: "CourierNode"; or "op".
      text: Function or class that it runs: "Learner".
    """

    name: str
    label: str
    kind: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """A program or a dataflow as vertices and the edges between them.

    Attributes:
      program: Its name.
      vertices: In the order they were added; a group's stand together.
      edges: The edges between them.
      kind: What it is, in the title of the picture.
      edges_are: What its edges are, where one arrow shows several.
    """

    program: str
    vertices: Sequence[Vertex]
    edges: Sequence[GraphEdge]
    kind: str = "program"
    edges_are: str = "handles"

    def groups(self) -> dict[str, list[Vertex]]:
        """Return the vertices by label."""
        groups: dict[str, list[Vertex]] = {}
        for vertex in self.vertices:
            groups.setdefault(vertex.label, []).append(vertex)
        return groups
