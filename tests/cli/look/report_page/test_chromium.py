"""The page in a real browser: drawn, silent, and asking nothing of anybody."""

import os
import re
import shutil
import signal
import subprocess
from html.parser import HTMLParser

import pytest

from replicator.cli.look.report_page.markup import element
from replicator.cli.look.report_page.page import POLICY, write_report
from tests.cli.look.report_page.runs import make_run

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None,
        reason="Chromium is not installed: run `tests/install_chromium.sh` as root",
    ),
]
_FLAGS = (
    "--headless",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--enable-logging=stderr",
    "--virtual-time-budget=60000",
    "--window-size=1400,1000",
)
_OWNED = "document.title='owned'"
# What would run if any of the places that show a name took it for HTML.
HOSTILE = f"<img src=x onerror={_OWNED}></script><script>{_OWNED}</script>"


def browse(page, profile):
    """Return the DOM after all scripts ran, and what they said on the console."""
    command = [BROWSER, *_FLAGS, f"--user-data-dir={profile}", "--dump-dom"]
    with subprocess.Popen(
        [*command, page.as_uri()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,  # it has children
    ) as browser:
        try:
            dom, log = browser.communicate(timeout=300)
        finally:
            if browser.poll() is None:
                os.killpg(browser.pid, signal.SIGKILL)
    return dom, re.findall(r".*CONSOLE.*", log)


class Dom(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.title, self._in_title = [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in_title = tag == "title"

    def handle_endtag(self, tag):
        self._in_title = False

    def handle_data(self, data):
        self.title += data if self._in_title else ""

    def classes(self):
        return [
            word for _, given in self.tags for word in given.get("class", "").split()
        ]


@pytest.fixture(scope="module")
def browsed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browsed")
    run = make_run(folder / "a_run", name=HOSTILE)
    write_report(run, folder / "page.html")
    dom, console = browse(folder / "page.html", folder / "profile")
    return Dom(dom), console


def test_all_curves_are_drawn(browsed):
    dom, _ = browsed
    [body] = [given for tag, given in dom.tags if tag == "body"]
    plots = dom.classes().count("plot")
    assert body["data-drawn"] == str(plots) == "3"
    assert dom.classes().count("scatterlayer") == plots
    # The earlier run and this one, but for the rate, which is new; loss has a gap.
    assert dom.classes().count("js-line") == 2 + 2 + 1 + 1
    assert dom.classes().count("xtick") > 3 * plots


def test_the_console_is_silent(browsed):
    _, console = browsed
    assert console == []


def test_no_name_was_run(browsed):
    dom, _ = browsed
    assert dom.title == "a_run · replicator"
    assert not [given for tag, given in dom.tags if tag == "img" and "src" in given]


def test_nothing_was_asked_of_a_network(browsed):
    # What a script asks for is refused by the page's policy, and would be heard.
    dom, console = browsed
    assert console == []
    fetching = {"src", "href", "srcset", "data"}
    links = [value for _, given in dom.tags for value in map(given.get, fetching)]
    assert not [link for link in links if link and not link.startswith("#")]


_TURN_ALL = """
const controls = document.getElementById("controls");
controls.x.value = "time";
controls.scale.value = "log";
controls.smooth.value = "0.9";
controls.marks.checked = controls.earlier.checked = false;
controls.dispatchEvent(new Event("input"));
document.querySelector("figure button").click();
document.querySelector(".kinds input[data-kind=saved]").click();
"""


def test_controls_draw_anew_in_silence(tmp_path):
    run, page = make_run(tmp_path / "a_run"), tmp_path / "page.html"
    write_report(run, page)
    turned = f"<script>{_TURN_ALL}</script></body>"
    page.write_text(page.read_text().replace("</body>", turned))
    text, console = browse(page, tmp_path / "profile")
    assert console == []
    dom = Dom(text)
    # Smoothed curves have a faint one of what was measured; loss has a gap in both.
    assert dom.classes().count("js-line") == 2 * (2 + 1 + 1)
    rows = [given for tag, given in dom.tags if tag == "tr" and "data-kind" in given]
    assert {row["data-kind"] for row in rows if "hidden" in row} == {"phases", "saved"}
    assert "wide" in dom.classes()


@pytest.mark.parametrize(
    "script", ["throw new Error('heard')", "fetch('https://heard.invalid')"]
)
def test_an_error_or_a_request_would_be_heard(tmp_path, script):
    head = element("meta", http_equiv="Content-Security-Policy", content=POLICY)
    (tmp_path / "page.html").write_text(f"{head}<script>{script}</script>")
    _, console = browse(tmp_path / "page.html", tmp_path / "profile")
    assert "heard" in " ".join(console)
