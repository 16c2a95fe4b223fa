"""Real servers of buckets on this host, and a proxy before them that disturbs requests.

moto's server stands in for S3, gcp-storage-emulator for GCS. moto honours conditional
puts; the emulator of GCS does not.
"""

import contextlib
import http.client
import http.server
import json
import os
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

BUCKET = "bucket"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_REGION": "us-east-1",
}

Fault: TypeAlias = Literal[
    "400",
    "401",
    "403",
    "404",
    "409",
    "412",
    "429",
    "500",
    "503",
    "lost",
    "cut",
    "silence",
    "stale",
]
"""A status instead of the server's; or the request is carried out and its answer lost;
the answer cut in half; no answer; the first answer that this request ever had."""

Disturb: TypeAlias = Callable[[str, str], Fault | None]
"""`disturb(method, path)` of a request; called by many threads."""

_REASONS = {"400": "ExpiredToken", "403": "AccessDenied", "404": "NoSuchBucket"}


class FaultyProxy:
    """An HTTP server that forwards requests to another one, and disturbs some.

    Attributes:
      url: Where it listens.
      disturb: Decides on each request.
      requests: Requests so far, as (method, path).
      silence_s: Seconds without an answer, where that is the fault.

    Args:
      port: Port of the other server, on this host.
    """

    def __init__(self, port: int):
        self.disturb: Disturb = lambda method, path: None
        self.silence_s = 20.0
        self.requests: list[tuple[str, str]] = []
        self._first: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}
        self._closed = threading.Event()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

            def handle_any(self) -> None:
                proxy._handle(self, port)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that was killed

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handle(self, asked: http.server.BaseHTTPRequestHandler, port: int) -> None:
        body = asked.rfile.read(int(asked.headers.get("content-length") or 0))
        self.requests.append((asked.command, asked.path))
        fault = self.disturb(asked.command, asked.path)
        if fault == "silence":
            self._closed.wait(self.silence_s)
            asked.close_connection = True
            return
        if fault is not None and fault.isdecimal():
            self._answer(asked, int(fault), [], _error(asked.path, fault))
            return
        status, headers, data = _forward(asked, body, port)
        if "startOffset=" in asked.path:
            data = _in_range(asked.path, data)
        if status == 200 and (asked_range := asked.headers.get("range")):
            status, headers, data = _part(asked_range, headers, data)
        first = self._first.setdefault(asked.path, (status, headers, data))
        if fault == "stale":
            status, headers, data = first
        if fault == "lost":
            asked.close_connection = True
            return
        self._answer(asked, status, headers, data, cut=fault == "cut")

    def _answer(
        self,
        asked: http.server.BaseHTTPRequestHandler,
        status: int,
        headers: list[tuple[str, str]],
        data: bytes,
        cut: bool = False,
    ) -> None:
        asked.send_response_only(status)
        names = {name.lower() for name, _ in headers}
        for name, value in headers:
            asked.send_header(name, value)
        if "content-length" not in names:
            asked.send_header("Content-Length", f"{len(data)}")
        asked.end_headers()
        if asked.command != "HEAD":
            asked.wfile.write(data[: len(data) // 2] if cut else data)
        asked.close_connection = cut


def _part(
    asked: str, headers: list[tuple[str, str]], data: bytes
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return a part of an object: the emulator of GCS gives no ends of objects."""
    first, last = asked.removeprefix("bytes=").split("-")
    start = int(first) if first else max(len(data) - int(last), 0)
    end = min(int(last) + 1, len(data)) if first and last else len(data)
    place = ("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
    return 206, [*headers, place], data[start:end]


def _error(path: str, status: str) -> bytes:
    """Return the body of an error, in the form of GCS or of S3."""
    if "/storage/v1/" in path:
        error = {"code": int(status), "message": "by a test", "errors": []}
        return json.dumps({"error": error}, indent=2).encode()
    reason = _REASONS.get(status, "Disturbed")
    return f"<Error><Code>{reason}</Code><Message>by a test</Message></Error>".encode()


def _in_range(path: str, data: bytes) -> bytes:
    """Leave out of a list of GCS what it should not hold: the emulator gives all."""
    asked = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)
    first, end = asked["startOffset"][0], asked.get("endOffset", ["\U0010ffff"])[0]
    body = json.loads(data)
    names = body.get("items", [])
    body["items"] = [each for each in names if first <= each["name"] < end]
    return json.dumps(body).encode()


def _forward(
    asked: http.server.BaseHTTPRequestHandler, body: bytes, port: int
) -> tuple[int, list[tuple[str, str]], bytes]:
    to = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        to.request(asked.command, asked.path, body=body, headers=dict(asked.headers))
        answer = to.getresponse()
        data = answer.read()
    finally:
        to.close()
    left_out = ["transfer-encoding", "connection", "date", "server"]
    left_out += ["content-length"] if asked.command != "HEAD" else []
    headers = [each for each in answer.getheaders() if each[0].lower() not in left_out]
    return answer.status, headers, data


@contextlib.contextmanager
def serving_s3() -> Iterator[FaultyProxy]:
    """Serve an S3 with one empty bucket; yield the proxy before it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    proxy = FaultyProxy(port)
    try:
        client = boto3.client(
            "s3",
            endpoint_url=f"http://{host}:{port}",
            region_name="us-east-1",
            aws_access_key_id="id",
            aws_secret_access_key="secret",
        )
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield proxy
    finally:
        proxy.close()
        server.stop()


@contextlib.contextmanager
def serving_gcs() -> Iterator[FaultyProxy]:
    """Serve a GCS with one empty bucket; yield the proxy before it."""
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    running = server._api._httpd
    assert running is not None
    proxy = FaultyProxy(running.server_address[1])
    try:
        yield proxy
    finally:
        proxy.close()
        server.stop()


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
