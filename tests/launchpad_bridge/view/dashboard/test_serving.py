import http.client
import json
import logging
import os
import resource
import socket
import stat
import threading
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import pytest

import replicator.launchpad_bridge as lp
from replicator.cli.main import main
from replicator.errors import NodeFailedError
from replicator.rpc.client.client import statistics
from tests.launchpad_bridge.noted import wait_until_noted
from tests.launchpad_bridge.programs import Counter
from tests.rpc.courier_cases import wait_until

LONG_S = 60


def program():
    made = lp.Program("shown")
    counter = made.add_node(lp.CourierNode(Counter), label="counter")
    made.add_node(lp.CourierNode(Counter, counter), label="other")
    return made, counter


class Shown:
    """A program that runs with its page."""

    def __init__(self, run, handle):
        self.run, self.handle = run, handle
        file = run.plan.folder / "dashboard.url"
        self.mode = stat.S_IMODE(file.stat().st_mode)
        self.link = file.read_text()
        self.parts = urlsplit(self.link)
        self.port = self.parts.port

    def request(self, path=None, *, method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG_S)
        path = self.parts.path if path is None else path
        connection.request(method, path, headers=headers)
        return connection.getresponse(), connection

    def status(self, *args, **kwargs):
        response, connection = self.request(*args, **kwargs)
        body = response.read()
        connection.close()
        return response.status, body

    def feed(self):
        return Feed(*self.request(f"{self.parts.path}feed"))


class Feed:
    """The samples that a page gets."""

    def __init__(self, response, connection):
        assert response.status == 200
        self.response, self.connection = response, connection

    def next(self):
        """Return the next sample; None at the end."""
        while line := self.response.readline():
            if line.startswith(b"data: "):
                return json.loads(line[6:])
        return None

    def close(self):
        self.response.close()
        self.connection.close()


@pytest.fixture
def shown(capsys):
    made, handle = program()
    with lp.launch(made, launch_type="threads", dashboard=True) as run:
        wait_until_noted(run)
        yield Shown(run, handle)


def test_the_link_is_printed_and_kept_where_only_its_owner_reads(shown, capsys):
    assert capsys.readouterr().out == f"shown: look at {shown.link}\n"
    assert shown.mode == 0o600
    assert shown.parts.hostname == "127.0.0.1"


def test_replicator_program_tells_the_link(shown, capsys):
    assert main(["program", shown.run.run_id]) == 0
    assert f"\npage: {shown.link}\n" in capsys.readouterr().out


def test_the_link_opens_the_page_and_its_files(shown):
    for name, word in [("", b"<svg"), ("page.js", b"feed"), ("page.css", b"table")]:
        status, body = shown.status(f"{shown.parts.path}{name}")
        assert (status, word in body) == (200, True), name


def test_all_answers_tell_the_browser_what_to_refuse(shown):
    for path in ("/", shown.parts.path, f"{shown.parts.path}nothing"):
        response, connection = shown.request(path)
        response.read()
        connection.close()
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["server"] is None


def test_without_the_token_every_request_is_refused(shown):
    token = shown.parts.path.strip("/")
    other = "0" * len(token)
    for name in ("", "page.js", "page.css", "feed", "nothing"):
        for path in (f"/{name}", f"/{other}/{name}", f"/?{token}", "/favicon.ico"):
            status, body = shown.status(path)
            assert (status, b"svg" in body) == (403, False), path


def test_a_page_that_calls_this_host_by_its_own_name_is_refused(shown):
    for host in ("evil.example", f"evil.example:{shown.port}", "127.0.0.1"):
        assert shown.status(Host=host)[0] == 403
    assert shown.status(Origin="https://evil.example")[0] == 403


def test_nothing_can_be_changed_by_the_page(shown):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert shown.status(method=method)[0] == 405
    assert shown.status(method="HEAD") == (200, b"")
    assert not shown.run.is_over


def test_it_listens_on_loopback_alone(shown):
    elsewhere = [
        address[4][0]
        for address in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        if not address[4][0].startswith("127.")
    ]
    for host in {*elsewhere, "127.0.0.2"}:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, shown.port), timeout=LONG_S)


def test_a_feed_tells_states_and_traffic(shown):
    client = shown.handle.dereference()
    client.add(1)
    feed = shown.feed()
    wait_until(lambda: called(feed.next()) == 1)
    client.add(1)
    wait_until(lambda: called(feed.next()) == 2)
    feed.close()


def called(said):
    counter = said["workers"][0]
    assert (counter["name"], counter["state"]) == ("counter", "running")
    return counter["methods"].get("add", {}).get("calls")


def test_servers_are_asked_while_somebody_looks_and_then_left_alone(shown):
    client = shown.handle.dereference()
    assert statistics(client).connections == 1  # this one
    feeds = [shown.feed() for _ in range(3)]
    for feed in feeds:
        feed.next()
    wait_until(lambda: statistics(client).connections == 2)
    for feed in feeds:
        feed.close()
    wait_until(lambda: statistics(client).connections == 1)


@pytest.mark.parametrize("how", ["stopped", "failed"])
def test_the_last_word_of_a_feed_is_how_it_ended(capsys, how):
    made, handle = program()
    gate = threading.Event()
    made.add_node(lp.PyNode(lambda: gate.wait(LONG_S) and 1 / 0), label="bad")
    run = lp.launch(made, launch_type="threads", dashboard=True)
    try:
        feed = Shown(run, handle).feed()
        said = feed.next()
        while said["phase"] == "starting":
            said = feed.next()
        assert said["phase"] == "running"
        if how == "failed":
            gate.set()
            with pytest.raises(NodeFailedError):
                run.wait()
    finally:
        run.stop()
        gate.set()
        run.wait(raise_error=False)
    *_, last = iter(feed.next, None)
    feed.close()
    assert last["phase"] == "ended"
    assert ("ZeroDivisionError" in last["failure"]) or how == "stopped"
    assert (last["stopped_by"] == "the launcher") == (how == "stopped")


def test_it_ends_with_the_run_and_leaves_no_thread(capsys):
    before = set(threading.enumerate())
    made, handle = program()
    with lp.launch(made, launch_type="threads", dashboard=True) as run:
        shown = Shown(run, handle)
        feed = shown.feed()
        feed.next()
        idle = socket.create_connection(("127.0.0.1", shown.port))
    assert not {t.name for t in set(threading.enumerate()) - before if ours(t)}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", shown.port), timeout=LONG_S)
    feed.close()
    idle.close()


def ours(thread):
    return thread.name.startswith(("program dashboard", "replicator look", "asyncio"))


def test_the_token_is_in_no_log(shown, caplog):
    with caplog.at_level(logging.DEBUG):
        shown.status()
        shown.status(f"{shown.parts.path}nothing")
        feed = shown.feed()
        feed.next()
        feed.close()
    assert shown.parts.path.strip("/") not in caplog.text


def test_who_opens_many_connections_stops_no_program(shown):
    many = [socket.create_connection(("127.0.0.1", shown.port)) for _ in range(80)]
    for connection in many:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert shown.handle.dereference().add(1) == 1
    for connection in many:
        connection.close()
    wait_until(lambda: shown.status()[0] == 200)


@pytest.mark.parametrize(
    "junk",
    [b"\0" * 100, b"GET / HTTP\r\n\r\n", b"GET /" + b"x" * 100_000 + b"\r\n"],
)
def test_junk_ends_its_own_connection_only(shown, junk):
    with socket.create_connection(("127.0.0.1", shown.port), timeout=LONG_S) as peer:
        try:
            peer.sendall(junk)
            assert peer.recv(100)[:10] in (b"", b"HTTP/1.1 4")
        except ConnectionError:
            pass  # closed before all of it was read
    assert shown.status()[0] == 200


def test_a_program_without_a_page_has_none():
    made, _ = program()
    with lp.launch(made, launch_type="threads") as run:
        assert not (run.plan.folder / "dashboard.url").exists()


class Looking:
    """A launcher that looks at the page before anything runs, and cannot open."""

    name = "looking"

    def open(self, plan, report):
        self.link = (plan.folder / "dashboard.url").read_text()
        with urllib.request.urlopen(self.link, timeout=LONG_S) as page:
            self.status = page.status
        raise lp.LaunchError("no room")


def test_the_page_is_there_before_the_first_node_and_gone_if_none_starts(capsys):
    launcher = Looking()
    made, _ = program()
    with pytest.raises(lp.LaunchError, match="no room"):
        lp.launch(made, launcher, dashboard=True)
    assert launcher.status == 200
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(launcher.link, timeout=LONG_S)


@pytest.fixture
def many_descriptors():
    """Take more descriptors than `select` knows of."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = limits[1] if limits[1] != resource.RLIM_INFINITY else 4096
    if most < 2048:
        pytest.skip("this machine allows fewer")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), limits[1]))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for descriptor in taken:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_program_with_thousands_of_descriptors_has_a_feed(many_descriptors, shown):
    feed = shown.feed()
    assert feed.next()
    assert feed.next()
    feed.close()


def test_a_connection_that_found_no_thread_keeps_no_other_out(shown, monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if "process_request" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(40):
            with pytest.raises((ConnectionError, http.client.HTTPException)):
                shown.status()
    assert shown.status()[0] == 200
