"""Write a picture as Mermaid text, which GitHub and many editors draw."""

from collections.abc import Iterator

from replicator.monitoring.drawing.arrows import End, arrows_of
from replicator.monitoring.drawing.graph import Graph, Vertex


def mermaid_of(graph: Graph) -> str:
    """Return a flowchart: groups as subgraphs, handles as arrows.

    >>> print(mermaid_of(Graph(program="sum", vertices=[], edges=[])), end="")
    flowchart LR
    """
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
    # Ids of our own: a name of the user may be a keyword of Mermaid.
    ids = {vertex.name: f"w{number}" for number, vertex in enumerate(graph.vertices)}
    yield "flowchart LR"
    groups: dict[str, str] = {}
    for number, (label, group) in enumerate(graph.groups().items()):
        if len(group) == 1:
            yield f"  {_box(ids[group[0].name], group[0])}"
            continue
        groups[label] = f"g{number}"
        yield f'  subgraph g{number}["{_text(label)}"]'
        for vertex in group:
            yield f"    {_box(ids[vertex.name], vertex)}"
        yield "  end"

    def id_of(end: End) -> str:
        return groups[end.label] if end.name is None else ids[end.name]

    for arrow in arrows_of(graph):
        yield f"  {id_of(arrow.source)} --> {id_of(arrow.target)}"


def _box(name: str, vertex: Vertex) -> str:
    text = _text(vertex.name)
    if vertex.text:
        text += f"<br/>{_text(vertex.text)}"
    return f'{name}["{text}"]'


def _text(text: str) -> str:
    """Return text with the special characters of Mermaid and HTML escaped."""
    return "".join(
        c if c.isalnum() or c in " .,_-/" else f"#{ord(c)};" if c.isprintable() else " "
        for c in text
    )
