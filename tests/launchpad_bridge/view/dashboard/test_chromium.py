"""The page of a running program in a real browser: drawn, live, silent, harmless."""

import contextlib
import threading

import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ConnectionLostError, ServerStoppedError
from tests.browser import BROWSER, MISSING, Page
from tests.launchpad_bridge.programs import SOON_S, Counter
from tests.launchpad_bridge.view.dashboard import picture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=MISSING),
]
_OWNED = "document.title='owned'"
HOSTILE = f"<img src=x onerror={_OWNED}></script><script>{_OWNED}</script>"


class Busy:
    """Calls its counter for as long as the program runs."""

    def __init__(self, counter):
        self._counter = counter

    def run(self):
        # All are stopped at once: a call may be cut off by the counter's end.
        with contextlib.suppress(ConnectionLostError, ServerStoppedError):
            while not lp.wait_for_stop(0.01):
                self._counter.add(1)


class Program:
    """A counter, four that call it, and one that fails when told."""

    def __init__(self):
        self.fails = threading.Event()
        program = lp.Program(HOSTILE)
        constructor = type(HOSTILE, (Counter,), {})
        counter = program.add_node(lp.CourierNode(constructor), label="counter")
        with program.group("callers", restart=lp.Restart(attempts=1, backoff_s=0.1)):
            for _ in range(4):
                program.add_node(lp.PyClassNode(Busy, counter))
        with program.group("weak", restart=lp.Restart(attempts=1, backoff_s=0.1)):
            program.add_node(lp.PyNode(self._fail))
        self.run = lp.launch(program, launch_type="threads", dashboard=True)
        self.link = (self.run.plan.folder / "dashboard.url").read_text()

    def _fail(self):
        while not lp.wait_for_stop(0.05):
            if self.fails.is_set():
                self.fails.clear()
                raise ValueError(HOSTILE)

    def close(self):
        self.run.stop()
        self.run.wait(SOON_S, raise_error=False)


@pytest.fixture
def program():
    made = Program()
    yield made
    made.close()


@pytest.fixture
def page(program, tmp_path):
    with Page(program.link, tmp_path / "profile") as page:
        page.wait_for("Number(document.body.dataset.updates) >= 2")
        yield page
        assert page.console == []
        assert page.evaluate("document.title") == f"{HOSTILE} · replicator"
        assert page.evaluate("document.images.length") == 0


def texts(page, selector):
    return page.evaluate(
        f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)"
    )


def test_the_graph_is_drawn_with_states_and_traffic(page):
    assert texts(page, "#graph .worker text:nth-of-type(1)") == [
        "counter",
        *[f"callers/{i}" for i in range(4)],
        "weak",
    ]
    states = "[...document.querySelectorAll('.worker')].map((g) => g.dataset.state)"
    page.wait_for(f"{states}.every((state) => state === 'running')")
    (traffic,) = texts(page, ".arrow .traffic")
    assert "/s · " in traffic
    width = page.evaluate(
        "document.querySelector('.arrow path').getAttribute('stroke-width')"
    )
    assert 1.4 < float(width) <= 5.5


def test_the_table_goes_on(page):
    calls = "document.querySelector('#workers tbody td:nth-child(6)').textContent"
    assert float(page.evaluate(calls).replace(",", "")) > 0
    seen = page.evaluate("Number(document.body.dataset.updates)")
    page.wait_for(f"Number(document.body.dataset.updates) > {seen + 1}")
    assert len(texts(page, "#workers tbody tr")) == 6


def test_a_restart_is_seen_with_its_reason(program, page):
    program.fails.set()
    restarts = "[...document.querySelectorAll('#workers tbody tr')].at(-1).cells[3]"
    page.wait_for(f"{restarts}.textContent === '1'")
    notes = texts(page, ".worker[data-worker=weak] .note")
    assert notes[0] == "running, restart 1"


def test_how_it_failed_is_its_last_word(program, page):
    restarts = "[...document.querySelectorAll('#workers tbody tr')].at(-1).cells[3]"
    program.fails.set()
    page.wait_for(f"{restarts}.textContent === '1'")
    program.fails.set()
    page.wait_for("document.body.dataset.phase === 'ended'")
    (message,) = texts(page, "#message")
    assert message == f"`weak` raised ValueError: {HOSTILE}"
    assert len(texts(page, "#workers tbody tr")) == 6, "what was last said stays"
    states = texts(page, "#workers tbody td.state")
    assert states == ["stopped"] * 5 + ["raised"]


def test_the_picture_of_readme_can_be_made(tmp_path):
    picture.main(tmp_path / "dashboard.png")
    assert (tmp_path / "dashboard.png").read_bytes().startswith(b"\x89PNG")


def test_a_program_that_is_stopped_says_by_whom(program, page):
    program.run.stop()
    page.wait_for("document.body.dataset.phase === 'ended'")
    assert texts(page, "#message") == ["Stopped by the launcher."]


def test_a_name_that_was_made_to_point_here_shows_nothing(program, tmp_path):
    link = program.link.replace("127.0.0.1", "evil.example")
    rule = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    with Page(link, tmp_path / "profile", flags=[rule]) as page:
        assert page.evaluate("location.host").startswith("evil.example:")
        assert page.evaluate("document.body.textContent").startswith("Forbidden")


def test_the_browser_itself_refuses_what_the_page_does_not_need(program, tmp_path):
    with Page(program.link, tmp_path / "profile") as page:
        # What a name that was taken for HTML would do.
        page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), "
            "{textContent: \"document.title='owned'\"}))"
        )
        page.evaluate("fetch('https://heard.invalid').catch(() => 0)")
        assert page.evaluate("document.title") != "owned"
        assert any("heard.invalid" in said for said in page.console)
