"""Attacks on a program that runs: its page, its folders, what it prints."""

import contextlib
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from benchmarks.rpc_attack.attack import LONG_S, hold, within
from benchmarks.rpc_attack.target import Target, private_folder

COMMANDS = "\x1b]0;x\x07\x1b[2J\x9b2J\r"
"""Output of a node: it would rename a window, and clear it."""
_START_S = 60.0
_COURIER = """
from replicator.launchpad_bridge.compat.courier_client import Client
try:
    Client("localhost:1", call_timeout=10).method()
except Exception as error:
    print(type(error).__name__)
"""


class Launched:
    """A program, and the process that launched it.

    Args:
      parent: Where its folders are made; by default where all are.
      logs: Where its logs go; by default into the run's own folder.
    """

    def __init__(self, *, parent: str = "", logs: str = "") -> None:
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end
        self._file = private_folder() / "told"
        environment = {**os.environ, **({"TMPDIR": parent} if parent else {})}
        command = [sys.executable, "-m", "benchmarks.rpc_attack.launched"]
        self.process = subprocess.Popen(
            [*command, str(self._file), *([logs] if logs else [])],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._words,
            stderr=subprocess.STDOUT,
        )

    def wait(self) -> Self:
        """Return once its nodes run.

        Raises:
          Won: They do not.
        """
        began = within(_START_S, lambda: self._file.exists() or self._is_over())
        hold(began and not self._is_over(), f"the program ended: {self.words()!r}")
        said = within(_START_S, lambda: b"said" in self.words() or self._is_over())
        hold(said and not self._is_over(), f"the program says: {self.words()!r}")
        return self

    @property
    def told(self) -> dict[str, Any]:
        """Return where the run is."""
        return json.loads(self._file.read_text())

    def words(self) -> bytes:
        """Return what a terminal would have got so far."""
        self._words.seek(0)
        return self._words.read()

    def check(self) -> None:
        """Return if it runs, and shows its page to who has the link."""
        self.wait()
        hold(self.ask()[0] == 200, "its page is not shown")

    def ask(
        self, path: str | None = None, *, method: str = "GET", **headers: str
    ) -> tuple[int, bytes]:
        """Ask the page; return the status and what it sent."""
        parts = urlsplit(self.told["link"])
        assert parts.port is not None, "as it is printed"
        page = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=LONG_S)
        with contextlib.closing(page):
            page.request(method, parts.path if path is None else path, headers=headers)
            answer = page.getresponse()
            return answer.status, answer.read()

    def processes(self) -> Iterator[Path]:
        """Yield the folders in /proc of what belongs to the run."""
        mark = self.told["run_id"].encode()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes():
                    yield path
        yield Path(f"/proc/{self.process.pid}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None, "a pipe"
        self.process.stdin.close()
        try:
            self.process.wait(LONG_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._words.close()

    def _is_over(self) -> bool:
        return self.process.poll() is not None


def page_without_the_token(target: Target, launched: Launched) -> None:
    """Ask without the link's token, or with another."""
    token = urlsplit(launched.wait().told["link"]).path.strip("/")
    for name in ("", "page.js", "feed", "../", "%2e%2e/"):
        for path in (f"/{name}", f"/{'0' * len(token)}/{name}", f"/?{token}"):
            status, body = launched.ask(path)
            hold(status in (403, 404) and b"svg" not in body, f"{path} is shown")


def page_under_another_name(target: Target, launched: Launched) -> None:
    """Ask with the token, as a page whose name was made to point here."""
    launched.wait()
    for host in ("evil.example", "127.0.0.1", "localhost.evil.example", ""):
        hold(launched.ask(Host=host)[0] in (400, 403), f"as {host!r} it is shown")
    for origin in ("https://evil.example", "null"):
        hold(launched.ask(Origin=origin)[0] == 403, f"to {origin} it is shown")


def page_that_changes(target: Target, launched: Launched) -> None:
    """Change something by the page."""
    launched.wait()
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT"):
        status = launched.ask(method=method)[0]
        hold(status in (400, 403, 405), f"{method} is answered with {status}")


def page_with_many_connections(target: Target, launched: Launched) -> None:
    """Take all places of the page, and send junk; the program must not notice."""
    port = urlsplit(launched.wait().told["link"]).port
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            with contextlib.suppress(OSError):
                place = ("127.0.0.1", port)
                raw = stack.enter_context(socket.create_connection(place, LONG_S))
                raw.sendall(b"\0\xff" * 100)
        hold(launched.process.poll() is None, "the program ended")
    hold(within(LONG_S, lambda: _is_shown(launched)), "the page is not shown again")


def _is_shown(launched: Launched) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return launched.ask()[0] == 200
    return False


def secret_in_sight(target: Target, launched: Launched) -> None:
    """Look for the secret in arguments, environments, logs and on the terminal."""
    told = launched.wait().told
    key = (Path(told["folder"]) / "secret").read_bytes()
    places = [launched.words()]
    for path in launched.processes():
        with contextlib.suppress(OSError):
            places += [(path / name).read_bytes() for name in ("cmdline", "environ")]
    places += [log.read_bytes() for log in Path(told["logs"]).iterdir()]
    for form in (key, key.hex().encode(), repr(key)[2:-1].encode()):
        hold(not any(form in place for place in places), "the secret is in sight")


def folders_of_a_run(target: Target, launched: Launched) -> None:
    """Look for a folder of the run that another user could have made."""
    told = launched.wait().told
    folder, logs = Path(told["folder"]), Path(told["logs"])
    hold(logs.is_relative_to(folder), f"logs lie in {logs}, beside {folder}")
    mode = stat.S_IMODE(folder.stat().st_mode)
    hold(mode == 0o700, f"others may do {mode:o} in {folder}")
    beside = [each for each in folder.parent.glob(f"{folder.name}*") if each != folder]
    hold(not beside, f"there is {beside}")


def commands_of_nodes(target: Target, launched: Launched) -> None:
    """Have a node print what a terminal obeys."""
    words = launched.wait().words().decode(errors="backslashreplace")
    hold("\\x1b[2J" in words, f"the node was not shown: {words!r}")
    hold(not set(words) & set("\x1b\x07\x9b\r"), "it reached the terminal")


def log_that_is_a_link(target: Target, launched: Launched) -> None:
    """Put a link in the place of a log, in a folder that others may write to."""
    shared = private_folder()
    shared.chmod(0o1777)
    diary = private_folder() / "diary"
    diary.write_text("dear")
    for name in ("echo.log", "say.log", "fork-server.log"):
        (shared / name).symlink_to(diary)
    with Launched(logs=str(shared)) as victim:
        hold(within(_START_S, lambda: victim.process.poll() is not None), "it runs")
        hold(b"cannot be written" in victim.words(), "nobody was told")
    hold(diary.read_text() == "dear", "the victim wrote to its own file")


def folders_left_behind(target: Target, launched: Launched) -> None:
    """Kill a launcher: what it leaves must go, and what is the user's must stay."""
    parent = private_folder()
    mine = parent / "lp-mine"
    mine.mkdir()
    os.utime(mine, (0, 0))
    with Launched(parent=str(parent)) as first:
        folder = Path(first.wait().told["folder"])
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        gone = within(LONG_S, lambda: not (folder / "secret").exists())
        hold(gone, "the secret of a killed launcher is left")
    with Launched(parent=str(parent)) as second:
        found = {mine, Path(second.wait().told["folder"])}
        left = {each for each in parent.iterdir() if each.name.startswith("lp-")}
        hold(left == found, f"there is {left}, expected {found}")


def link_for_a_courier(target: Target, launched: Launched) -> None:
    """Put a link in the place of the folder that `courier.Client` uses."""
    parent, elsewhere = private_folder(), private_folder()
    (parent / f"courier-{os.geteuid()}").symlink_to(elsewhere)
    refused_courier(parent)
    hold(not list(elsewhere.iterdir()), "the victim wrote to where the link leads")


def refused_courier(parent: Path) -> None:
    """Return if a client of courier refuses its folder in `parent`."""
    done = subprocess.run(
        [sys.executable, "-c", _COURIER],
        env={**os.environ, "TMPDIR": str(parent)},
        capture_output=True,
        text=True,
    )
    told = done.stdout.strip() or done.stderr[-200:]
    hold(told == "AuthenticationError", f"the client said {told!r}")


ATTACKS: dict[str, Callable[[Target, Launched], None]] = {
    attack.__name__: attack
    for attack in (
        page_without_the_token,
        page_under_another_name,
        page_that_changes,
        page_with_many_connections,
        secret_in_sight,
        folders_of_a_run,
        commands_of_nodes,
        log_that_is_a_link,
        folders_left_behind,
        link_for_a_courier,
    )
}
