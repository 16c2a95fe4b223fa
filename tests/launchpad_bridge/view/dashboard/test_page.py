import re
from html.parser import HTMLParser

from replicator.launchpad_bridge.graph import graph_of
from replicator.launchpad_bridge.view.dashboard.page import asset, event_of, page_of
from replicator.launchpad_bridge.view.watching.samples import EdgeSample, ProgramSample
from replicator.monitoring.drawing.layout import lay_out
from tests.monitoring.drawing.programs_to_draw import (
    HOSTILE,
    hostile,
    training,
)


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found, self.text = [], []
        self.feed(page.decode())

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def drawn(program):
    return Tags(page_of(lay_out(graph_of(program), note_lines=2)))


def test_the_page_has_the_picture_and_its_two_files_and_nothing_of_elsewhere():
    page = drawn(training())
    asked = [
        value
        for _, given in page.found
        for name, value in given.items()
        if name in {"src", "href", "srcset", "action", "data"}
    ]
    assert asked == ["data:,", "page.css", "page.js"]
    workers = [g["data-worker"] for tag, g in page.found if g.get("class") == "worker"]
    assert len(workers) == 10


def test_names_are_text():
    page = drawn(hostile())
    assert [tag for tag, _ in page.found].count("script") == 1
    assert HOSTILE in "".join(page.text)
    assert not [g for _, g in page.found for name in g if name.startswith("on")]


def test_the_script_never_takes_text_for_html():
    script = asset("page.js").decode()
    words = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\(|import"
    assert not re.search(words, script)
    assert not re.search(r"https?:|//[a-z]", re.sub(r"^//.*", "", script, flags=re.M))


def test_an_arrow_shows_the_traffic_of_all_edges_it_stands_for():
    layout = lay_out(graph_of(training()))
    edges = [
        EdgeSample(
            source=f"actors/{i}",
            target="replay",
            calls=9,
            calls_per_s=10.0 * (i + 1),
            bytes_per_s=1.0,
        )
        for i in range(6)
    ]
    snapshot = ProgramSample(
        program="training",
        run_id="r",
        pid=1,
        at_s=0.0,
        phase="running",
        failure="",
        stopped_by="",
        workers=[],
        edges=edges,
    )
    event = event_of(snapshot, layout)
    sources = [arrow.source.label for arrow, _ in layout.arrows]
    targets = [arrow.target.label for arrow, _ in layout.arrows]
    assert list(zip(sources, targets, event["arrows"], strict=True)) == [
        ("learner", "replay", {"calls_per_s": 0, "text": ""}),
        ("actors", "replay", {"calls_per_s": 210.0, "text": "210/s · 6.00 B/s"}),
        ("actors", "learner", {"calls_per_s": 0, "text": ""}),
        ("evaluator", "learner", {"calls_per_s": 0, "text": ""}),
    ]
    assert event["program"] == "training"
