"""Serve the page of a run, its files and a feed of samples, on loopback.

    accepting thread   "program dashboard": a thread for each connection, at most 32
    its thread         one request, one response; a feed goes on until the program ends
    the run's driver   `close`: each feed sends the last sample, then all threads end

A connection is for one request, whose parts wait at most 2 s, either way. Servers of
the program are called while a feed is open, once for all feeds; after the last feed
they are not called.
"""

import contextlib
import json
import logging
import select
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from replicator.base.host.standard_streams import lossy
from replicator.launchpad_bridge.view.dashboard import access, page
from replicator.launchpad_bridge.view.watching.found_runs import LINK, describe_run
from replicator.launchpad_bridge.view.watching.samples import ProgramSample
from replicator.launchpad_bridge.view.watching.watcher import Watcher
from replicator.monitoring.drawing.layout import lay_out
from replicator.rpc.security.private_files import create_private
from replicator.rpc.security.secret import Secret

INTERVAL_S = 1.0
_HOST = "127.0.0.1"
_LAST_SAMPLES_S = 5.0
_LOOK_S = 0.1
_PART_S = 2.0
_MOST_AT_ONCE = 32
_LONGEST_HEAD_BYTES = 16 * 1024
_TEXT, _HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
_FILES = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
_REFUSALS = {
    access.BAD_REQUEST: b"Bad request.\n",
    access.FORBIDDEN: b"Forbidden: open the link that the program has printed.\n",
    access.NOT_FOUND: b"Not found.\n",
    access.NOT_ALLOWED: b"The page is for reading.\n",
}
_LOG = logging.getLogger("replicator.launchpad_bridge")


class Dashboard:
    """The page of one run, from `start` until `close`.

    Attributes:
      link: Link that opens it, and is all that access needs.
    """

    def __init__(self, folder: Path) -> None:
        """Take a port of this host; nothing is served yet.

        Args:
          folder: Folder of the run, with its secret and its description.

        Raises:
          OSError: No port is free.
        """
        run_id = describe_run(folder)["run_id"]
        token = access.token_of(Secret.read(folder / "secret"), run_id)
        self._watcher = Watcher(folder)
        self._server = _Server(self._watcher, token)
        self.link = f"http://{_HOST}:{self._server.port}/{token}/"
        with open(create_private(folder / LINK), "w") as file:
            file.write(self.link)
        # Accepts connections until `close`; a daemon, if the script is killed.
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(_LOOK_S),
            name="program dashboard",
            daemon=True,
        )

    def start(self) -> None:
        """Serve, and print the link."""
        self._thread.start()
        text = f"{self._watcher.graph.program}: look at {self.link}"
        print(text, file=lossy(sys.stdout), flush=True)

    def close(self) -> None:
        """Send a last sample to each feed; leave no thread and no port."""
        if self._thread.ident is not None:
            self._server.shutdown()
        self._server.server_close()
        self._server.end_connections()
        self._watcher.close()


class _Server(ThreadingTCPServer):
    """HTTP server of one run; each connection has a thread."""

    daemon_threads = True
    request_queue_size = 4 * _MOST_AT_ONCE

    def __init__(self, watcher: Watcher, token: str) -> None:
        self.token = token
        self.drawing = lay_out(watcher.graph, note_lines=page.NOTE_LINES)
        self.page = page.page_of(self.drawing)
        self.closing = threading.Event()
        self._watcher = watcher
        # Guards `_open`: the accepting thread adds to it, the threads of connections
        # remove theirs, and `end_connections` waits until it is empty.
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        self._feeds = 0
        # Guards `_feeds` and `_seen`, and is held while the program is sampled, about a
        # second for each four servers. Never taken together with `_changed`.
        self._looking = threading.Lock()
        self._seen: tuple[float, ProgramSample] | None = None
        super().__init__((_HOST, 0), _Answer)
        self.port: int = self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin with a connection, if there are not too many."""
        with self._changed:
            is_taken = len(self._open) < _MOST_AT_ONCE
            if is_taken:
                self._open.add(request)
        if not is_taken:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was made, which would free the place
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a request, in the thread of its connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def _leave(self, request: socket.socket) -> None:
        with self._changed:
            self._open.discard(request)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error at debug level: a peer may go away at any time."""
        _LOG.debug("a connection to the dashboard ended", exc_info=True)

    def end_connections(self) -> None:
        """Make feeds send their last sample, and others end; wait for all."""
        self.closing.set()
        with self._changed:
            for connection in self._open:
                # Wakes a thread that reads or polls.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)
            self._changed.wait_for(lambda: not self._open, _LAST_SAMPLES_S)

    def feeds(self, by: int) -> None:
        """Count a feed that begins (1) or ends (-1); after the last, disconnect."""
        with self._looking:
            self._feeds += by
            if not self._feeds:
                self._seen = None
                self._watcher.rest()

    def look(self) -> ProgramSample:
        """Return a sample: the same one for calls within half an interval."""
        with self._looking:
            now_s = time.monotonic()
            if self._seen is not None and not self.closing.is_set():
                at_s, snapshot = self._seen
                if now_s - at_s < INTERVAL_S / 2:
                    return snapshot
            snapshot = self._watcher.sample()
            self._seen = now_s, snapshot
            return snapshot


class _Answer(BaseHTTPRequestHandler):
    """Handler of one request."""

    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = _PART_S

    def setup(self) -> None:
        """Begin with a connection."""
        super().setup()
        self.rfile: Any = _Head(self.rfile)

    def do_GET(self) -> None:
        """Check access and send the response."""
        # As it was sent: `self.path` is changed.
        path = self.requestline.split()[1]
        headers = [
            (name.lower().encode(), value.encode(errors="replace"))
            for name, value in self.headers.items()
        ]
        server = self.server
        status, asked = access.check(
            self.command, path, headers, token=server.token, port=server.port
        )
        if status != access.OK:
            self.send_error(status)
        elif asked == "feed" and self.command == "GET":
            self._feed()
        elif not asked:
            self._answer(status, _HTML, server.page)
        elif asked in _FILES:
            self._answer(status, _FILES[asked], page.asset(asked))
        else:
            self.send_error(access.NOT_FOUND)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_GET

    def send_error(self, code: int, message: Any = None, explain: Any = None) -> None:
        """Refuse a request; one that cannot be read gets no details."""
        status = code if code in _REFUSALS else access.BAD_REQUEST
        self._answer(status, _TEXT, _REFUSALS[status])

    def log_message(self, *_: Any, **__: Any) -> None:
        """Log nothing: each line would hold the token."""

    def _feed(self) -> None:
        """Send samples until the program ends, or the browser goes away."""
        # Unlike `select`, it takes any descriptor: the program may have thousands.
        peer = select.poll()
        peer.register(self.connection, select.POLLIN)
        self.server.feeds(1)
        try:
            self._answer(access.OK, "text/event-stream; charset=utf-8")
            while True:
                # Read before the sample, which is then the last state of the run.
                is_last = self.server.closing.is_set()
                sample = page.event_of(self.server.look(), self.server.drawing)
                # JSON has no line break, which would end the event.
                event = f"event: sample\ndata: {json.dumps(sample)}\n\n"
                self.wfile.write(event.encode())
                if is_last:
                    return
                # Nothing comes but the end: of the browser, or by `end_connections`.
                if peer.poll(1000 * INTERVAL_S) and not self.server.closing.is_set():
                    return
        finally:
            self.server.feeds(-1)

    def _answer(self, status: int, kind: str, body: bytes | None = None) -> None:
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in access.HEADERS.items()]
        lines += [f"content-type: {kind}", "connection: close"]
        if body is not None:
            lines.append(f"content-length: {len(body)}")
        if status == access.NOT_ALLOWED:
            lines.append("allow: GET, HEAD")
        head = "\r\n".join([*lines, "", ""]).encode()
        self.close_connection = True
        self.wfile.write(head + (b"" if self.command == "HEAD" else body or b""))


class _Head:
    """The head of a request, of which no more is read than a browser sends."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = _LONGEST_HEAD_BYTES

    def readline(self, most: int = -1) -> bytes:
        line = self._file.readline(self._left)
        self._left -= len(line)
        return line

    def close(self) -> None:
        self._file.close()
