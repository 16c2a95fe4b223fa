"""Chromium for tests of pages that live: asked through a pipe, with no library between.

`--remote-debugging-pipe` has it read commands from descriptor 3 and write answers to
descriptor 4: JSON, each ended by a zero byte (Chrome DevTools Protocol).
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
MISSING = "Chromium is not installed: run `tests/install_chromium.sh` as root"
LONG_S = 120.0
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
)
# The browser wants 3 and 4: nothing of ours may be there when they are put in place.
_EXEC = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One page in a browser of its own; as a context manager it ends with the block.

    Attributes:
      console: What scripts and the browser said, errors of loading too.
    """

    def __init__(self, url, profile, *, size=(1400, 900), flags=()):
        """Open `url`; `profile` is a folder for the browser's files."""
        self.console = []
        self._url, self._size = url, size
        self._number, self._session, self._rest = 0, None, b""
        self._is_loaded = False
        reads, self._write = map(_high, os.pipe())
        self._read, writes = map(_high, os.pipe())
        flags = [*_FLAGS, *flags, f"--window-size={size[0]},{size[1]}"]
        command = [BROWSER, *flags, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _EXEC, str(reads), str(writes), *command],
            pass_fds=(reads, writes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it has children
        )
        os.close(reads)
        os.close(writes)

    def __enter__(self):
        try:
            target = self._ask("Target.createTarget", url="about:blank")["targetId"]
            attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self._ask(f"{domain}.enable")
            self._ask("Page.navigate", url=self._url)
            until_s = time.monotonic() + LONG_S
            while not self._is_loaded:
                self._hear(self._next(until_s))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def evaluate(self, expression):
        """Return the value of an expression in the page, a promise's when it comes."""
        answer = self._ask(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition):
        """Wait until an expression in the page is true."""
        self.evaluate(
            "new Promise((done) => { const look = () => "
            f"({condition}) ? done(true) : setTimeout(look, 50); look(); }})"
        )

    def screenshot(self):
        """Return a picture of the whole page, as PNG."""
        width, height = self._size
        metrics = {"width": width, "height": height, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", deviceScaleFactor=1, **metrics)
        answer = self._ask("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])

    def _ask(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until_s = time.monotonic() + LONG_S
        while True:
            said = self._next(until_s)
            if said.get("id") == self._number:
                assert "error" not in said, said
                return said["result"]
            self._hear(said)

    def _hear(self, said):
        heard = {
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Log.entryAdded",
        }
        if said.get("method") in heard:
            self.console.append(json.dumps(said["params"]))
        self._is_loaded |= said.get("method") == "Page.loadEventFired"

    def _next(self, until_s):
        while b"\0" not in self._rest:
            left_s = until_s - time.monotonic()
            ready, _, _ = select.select([self._read], [], [], max(0.0, left_s))
            assert ready, "the browser does not answer"
            new = os.read(self._read, 1 << 16)
            assert new, "the browser has ended"
            self._rest += new
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


def _high(descriptor):
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
