"""The page: everything is in it, nothing is fetched, and no name can become code."""

import json
from html.parser import HTMLParser

import numpy as np
import optax
import pytest

from replicator.cli.look.report_page import plots
from replicator.cli.look.report_page.markup import Markup, element
from replicator.cli.look.report_page.page import make_page, time_spent, write_report
from replicator.cli.look.report_page.run_files import read_run
from tests.cli.look.report_page.runs import HOSTILE, make_run, rows, write_rows
from tests.steps import regression_batch, replicas, trainer


class Elements(HTMLParser):
    """Collects start tags, and the text outside of scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.data, self._inside = [], "", "", ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") or tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "data":
            self.data += data
        elif self._inside not in ("script", "style"):
            self.text += data


@pytest.fixture(autouse=True)
def _no_plotly(monkeypatch):
    # 2 MB that these tests need not parse; test_chromium.py runs the real one.
    nothing = element("script", type="text/plain", id="plotly")
    monkeypatch.setattr(
        "replicator.cli.look.report_page.page.plotly_script", lambda: nothing
    )


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "a_run", name=HOSTILE)


def test_the_page_tells_the_run(run):
    text = Elements(make_page(read_run(run))).text
    for told in ("a_run", "200 of 200", "ended", "a-host", "num_replicas", "spike"):
        assert told in text


def test_no_name_becomes_an_element(run):
    found = Elements(make_page(read_run(run)))
    assert [tag for tag, _ in found.tags].count("script") == 3
    assert HOSTILE in found.text
    assert not any(name.startswith("on") for _, given in found.tags for name in given)


def test_the_data_of_the_plots_is_json_without_angle_brackets(run):
    found = Elements(make_page(read_run(run)))
    data = json.loads(found.data)
    assert not set("<>&") & set(found.data)
    assert len(data["curves"]) == 3
    assert {mark["kind"] for mark in data["marks"]} == {"resumed", "spike"}


def test_nothing_is_fetched_and_the_browser_is_told_so(run):
    found = Elements(make_page(read_run(run)))
    fetching = {"src", "href", "srcset", "action", "formaction", "data"}
    assert not [given for _, given in found.tags if fetching & set(given)]
    [policy] = [given for tag, given in found.tags if "http-equiv" in given]
    assert policy["content"].startswith("default-src 'none'")


def test_goodput_is_cut_by_what_was_lost(run):
    text = Elements(make_page(read_run(run))).text
    assert "Where the time went" in text
    assert "compile" in text
    assert "restore" in text


@pytest.mark.parametrize("seconds", [None, "x", {"step": "x"}])
def test_a_journal_of_another_kind_tells_no_goodput(seconds):
    event = {"kind": "phases", "time": "2026-11-21T12:00:00", "seconds": seconds}
    assert time_spent([event]) is None


def test_a_run_with_metrics_alone_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time_s": 0.1, "loss": 2}\n')
    text = Elements(make_page(read_run(tmp_path))).text
    assert "run.json could not be read" in text
    assert "not recorded" in text


def test_a_long_run_of_many_metrics_has_a_small_page(tmp_path):
    numbers = {f"metric_{number}": 0.123456789 for number in range(30)}
    long = [
        row | {name: value * row["step"] for name, value in numbers.items()}
        for row in rows(2000)
    ]
    write_rows(tmp_path / "metrics.jsonl", long)
    for earlier in range(5):
        write_rows(tmp_path / "earlier" / f"{earlier}" / "metrics.jsonl", long)
    assert len(make_page(read_run(tmp_path))) < 1_500_000


def test_a_run_without_metrics_has_a_page(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    assert "No metrics were written" in make_page(read_run(tmp_path))


def test_a_strategy_is_shown_where_one_was_recorded(run):
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"strategy": {"mesh": {"a": 8}}}))
    assert "Strategy" in make_page(read_run(run))


def test_a_real_run_shows_its_strategy(tmp_path):
    init_fn, step_fn = trainer(replicas(2).wrap_optimizer(optax.sgd(0.1)))
    replicas(2).run(
        step_fn,
        [regression_batch()],
        init_fn=init_fn,
        steps=2,
        directory=tmp_path,
        display=False,
    )
    strategy = Elements(make_page(read_run(tmp_path))).text.partition("Strategy")[2]
    for told in ("replicates", "mesh", "replica", "2", "fast"):
        assert told in strategy[:200]


def test_write_report_writes_one_file(run, tmp_path):
    before = set(run.rglob("*"))
    write_report(run, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert set(run.rglob("*")) == before


def test_plotly_is_asked_for_by_name_where_it_is_missing(monkeypatch):
    def files(package):
        raise ModuleNotFoundError(package)

    monkeypatch.setattr(plots.resources, "files", files)
    with pytest.raises(
        ImportError, match=r"must have plotly.*jax-replicator\[report\]"
    ):
        plots.plotly_script()


def test_text_and_attributes_are_escaped_and_markup_is_not():
    inner = element("b", "<&>", title='"><i')
    assert inner == '<b title="&quot;&gt;&lt;i">&lt;&amp;&gt;</b>'
    assert (
        element("p", inner, None, hidden=True, class_=None) == f"<p hidden>{inner}</p>"
    )
    assert isinstance(inner, Markup)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "events.jsonl"])
def test_no_damage_to_a_file_ends_the_report(run, name):
    whole, random = (run / name).read_bytes(), np.random.default_rng(0)
    for _ in range(20):
        damaged = bytearray(whole[: random.integers(len(whole))] or whole)
        for place in random.integers(len(damaged), size=4):
            damaged[place] = random.choice(list(b'"{}[],:0123-eNtfn\\\n\xff'))
        (run / name).write_bytes(damaged)
        assert make_page(read_run(run)).endswith("</html>\n")


@pytest.mark.parametrize("value", [None, 3, "x", [1], {"a": {"b": []}}, True, 1e300])
def test_no_value_in_an_event_or_the_record_ends_the_report(run, value):
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(dict.fromkeys(record, value)))
    events = [
        json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()
    ]
    names = {name for event in events for name in event} - {"kind"}
    for name in [*names, "kind"]:
        odd = [json.dumps(event | {name: value}) for event in events]
        (run / "events.jsonl").write_text("\n".join(odd))
        assert make_page(read_run(run)).endswith("</html>\n")
