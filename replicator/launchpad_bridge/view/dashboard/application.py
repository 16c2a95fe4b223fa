"""Answers requests to the page: the page, its files, and a feed of samples.

An application in the words of ASGI, which knows no server. Servers of the program are
asked while a feed is open, once for all feeds; when the last is closed they are left
alone.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias, final

from replicator.launchpad_bridge.view.dashboard import access
from replicator.launchpad_bridge.view.dashboard.page import (
    NOTE_LINES,
    asset,
    event_of,
    page_of,
)
from replicator.launchpad_bridge.view.drawing.layout import lay_out
from replicator.launchpad_bridge.view.watching.samples import Snapshot
from replicator.launchpad_bridge.view.watching.watcher import Watcher

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

INTERVAL_S = 1.0
_FILES = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
_WORDS = {
    access.FORBIDDEN: b"Forbidden: open the link that the program has printed.\n",
    access.NOT_FOUND: b"Not found.\n",
    access.NOT_ALLOWED: b"The page is for reading.\n",
}


@final
class Application:
    """The page of one run; lives in one event loop."""

    def __init__(self, watcher: Watcher, *, token: str, port: int) -> None:
        """Make it, in the loop that will call it.

        Args:
          watcher: Of the run.
          token: That requests must have.
          port: That it is served at.
        """
        self._watcher = watcher
        self._token = token
        self._port = port
        self._layout = lay_out(watcher.graph, note_lines=NOTE_LINES)
        self._page = page_of(self._layout)
        self._feeds = 0
        self._looking = asyncio.Lock()
        self._closing = asyncio.Event()
        self._seen: tuple[float, Snapshot] | None = None

    def close(self) -> None:
        """Send each feed how the program ended, and end it."""
        self._closing.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope.get("raw_path", b"").decode("latin-1")
        status, asked = access.check(
            scope["method"],
            path,
            scope["headers"],
            token=self._token,
            port=self._port,
        )
        is_head = scope["method"] == "HEAD"
        if status == access.OK and asked == "feed" and not is_head:
            await self._feed(receive, send)
            return
        body, kind = b"", "text/html; charset=utf-8"
        if status == access.OK and not asked:
            body = self._page
        elif status == access.OK and asked in _FILES:
            body, kind = asset(asked), _FILES[asked]
        else:
            status = access.NOT_FOUND if status == access.OK else status
            body, kind = _WORDS[status], "text/plain; charset=utf-8"
        length = str(len(body)).encode()
        await _start(send, status, kind, ((b"content-length", length),))
        await send({"type": "http.response.body", "body": b"" if is_head else body})

    async def _feed(self, receive: Receive, send: Send) -> None:
        """Send samples until the program ends, or who looks on goes away."""
        self._feeds += 1
        gone = asyncio.create_task(_gone(receive))
        closing = asyncio.create_task(self._closing.wait())
        try:
            await _start(send, access.OK, "text/event-stream; charset=utf-8")
            while not gone.done():
                # Looked at before: what is seen after it is how the run ended.
                is_last = self._closing.is_set()
                snapshot = await self._look()
                await send(_event(event_of(snapshot, self._layout)))
                if is_last:
                    break
                await asyncio.wait(
                    (gone, closing),
                    timeout=INTERVAL_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            closing.cancel()
            self._feeds -= 1
            if not self._feeds:
                self._seen = None
                async with self._looking:
                    await asyncio.to_thread(self._watcher.rest)

    async def _look(self) -> Snapshot:
        """Return a sample: one for all who ask within the same while."""
        async with self._looking:
            now_s = time.monotonic()
            if self._seen is not None and not self._closing.is_set():
                at_s, snapshot = self._seen
                if now_s - at_s < INTERVAL_S / 2:
                    return snapshot
            snapshot = await asyncio.to_thread(self._watcher.sample)
            self._seen = now_s, snapshot
            return snapshot


async def _gone(receive: Receive) -> None:
    """Return when who looks on has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(
    send: Send,
    status: int,
    kind: str,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    fixed = [(name.encode(), value.encode()) for name, value in access.HEADERS.items()]
    allowed = [(b"allow", b"GET, HEAD")] if status == access.NOT_ALLOWED else []
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", kind.encode()), *headers, *fixed, *allowed],
        }
    )


def _event(said: dict[str, object]) -> dict[str, Any]:
    # JSON has no line break, which would end the event.
    body = f"event: sample\ndata: {json.dumps(said)}\n\n".encode()
    return {"type": "http.response.body", "body": body, "more_body": True}
