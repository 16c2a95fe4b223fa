"""Write a picture as Mermaid text, which GitHub and many editors draw."""

from collections.abc import Iterator

from replicator.launchpad_bridge.graph import Graph, Vertex
from replicator.launchpad_bridge.view.drawing.arrows import End, arrows_of


def mermaid_of(graph: Graph) -> str:
    """Return a flowchart: groups as subgraphs, handles as arrows."""
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
    # Names of ours: what users call things may be a word of Mermaid's.
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

    def told(end: End) -> str:
        return groups[end.label] if end.name is None else ids[end.name]

    for arrow in arrows_of(graph):
        yield f"  {told(arrow.source)} --> {told(arrow.target)}"


def _box(name: str, vertex: Vertex) -> str:
    text = _text(vertex.name)
    if vertex.text:
        text += f"<br/>{_text(vertex.text)}"
    return f'{name}["{text}"]'


def _text(text: str) -> str:
    """Return text in which every character of Mermaid's or HTML's stands for itself."""
    return "".join(
        c if c.isalnum() or c in " .,_-/" else f"#{ord(c)};" if c.isprintable() else " "
        for c in text
    )
