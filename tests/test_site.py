"""The built site in a browser: no page is cut off, and its search finds words."""

import functools
import http.server
import threading

import pytest

from tests.browser import BROWSER, MISSING, Page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(BROWSER is None, reason=MISSING),
]
PAGES = [
    *("docs/index", "docs/start/ten_lines", "docs/guides/steps"),
    *("docs/reference/api/replicator", "docs/reference/errors"),
]
FOUND = "document.querySelectorAll('#search-results li > a').length"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Build the site, serve it on this machine, and return its address."""
    pytest.importorskip("sphinx_book_theme")
    pytest.importorskip("myst_nb")
    from benchmarks.docs import site

    folder = tmp_path_factory.mktemp("site")
    assert site.build(folder) == []
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_no_wider_than_its_window(address, tmp_path, name, width):
    with Page(f"{address}/{name}.html", tmp_path, size=(width, 900)) as page:
        page.screenshot()  # at this size
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("words", ["all_reduce", "out of memory", "wandb"])
def test_its_search_finds(address, tmp_path, words):
    with Page(f"{address}/search.html?q={words}", tmp_path) as page:
        page.wait_for(f"{FOUND} > 0")
