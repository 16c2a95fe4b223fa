"""The end of a launcher on another host: a guard whose lifeline is ssh's pipe.

Its source comes through that pipe (`bundle.py`), so it has the launcher's version and
the standard library only. It starts one command, passes on its output and the signals
for it, and kills it and all that it started, whatever their session, as soon as

- the command has exited, or
- the pipe ends: the launcher, ssh or sshd's process is gone, or
- nothing has come for `lost_after_s`: the launcher is suspended, or the network cut.

Two processes: one does this, the other waits for its end, and then kills what is left;
the first ends with it. So a kill of either leaves nothing behind, nor does a stop of
the first, once the pipe has ended. What an earlier
attempt of the same process left here is killed before the next one starts.
"""

import contextlib
import glob
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from replicator.distributed.processes import guard, sweep
from replicator.distributed.remote import frames
from replicator.distributed.remote.frames import Frames, Outbox, frame, read_some

_SECRET_FILE = "REPLICATOR_RPC_SECRET_FILE"
_PROGRESS_FILE = "REPLICATOR_PROGRESS_FILE"
# Longer than a sweep (`guard._SWEEP_S`).
_END_S = 12.0


def main() -> None:
    """Read an order from standard input, and run its command until either ends."""
    inbox, outbox = Frames(), Outbox(1)
    outbox.put(frames.PREAMBLE)
    outbox.flush()
    order = _read_order(inbox)
    signal.alarm(0)
    if order is None:
        return
    guard.adopt_orphans()
    sweep.kill_marked(order["owner"])
    for left in glob.glob(f"{tempfile.gettempdir()}/{order['owner']}-*"):
        shutil.rmtree(left, ignore_errors=True)
    # Of this user alone. Both processes delete it: one may be killed.
    folder = tempfile.mkdtemp(prefix=f"{order['owner']}-")
    watcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        guard.adopt_orphans()
        _serve(order, inbox, outbox, Path(folder), watcher)
    else:
        _wait_or_kill(pid)
    guard.sweep_children()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _wait_or_kill(pid: int) -> None:
    """Wait for the end of the child that serves; kill it if it outlives the pipe."""
    exited, poll = os.pidfd_open(pid), select.poll()
    poll.register(exited, select.POLLIN)
    poll.register(0, 0)  # its end alone: the child reads
    if exited not in dict(poll.poll()):
        # It was suspended, perhaps: one that runs ends by itself.
        poll.unregister(0)
        if not poll.poll(_END_S * 1e3):
            os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _serve(
    order: dict[str, Any], inbox: Frames, outbox: Outbox, folder: Path, watcher: int
) -> None:
    with contextlib.suppress(OSError):  # nobody reads
        watched = os.pidfd_open(watcher)
        try:
            child = _start(order, folder)
        except OSError as error:
            where = f": {os.fsdecode(error.filename)}" if error.filename else ""
            outbox.put(frame(frames.REFUSED, _encoded(f"{error.strerror}{where}")))
            outbox.flush()
            return
        _HostGuard(child, order, inbox, outbox, folder / "progress").run(watched)


def _read_order(inbox: Frames) -> dict[str, Any] | None:
    """Return the order; None if the pipe ends before it."""
    # Before it is carried out a launcher sends nothing else but beats.
    while True:
        select.select([0], [], [])
        # Where it is one socket with the output, it does not block, either.
        data = read_some(0)
        if data == b"":
            return None
        for kind, payload in inbox.feed(data or b""):
            if kind == frames.ORDER:
                return json.loads(payload)


def _start(order: dict[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    environment = dict(order["environment"])
    environment[sweep.MARK] = f"{order['owner']}:"
    environment[_PROGRESS_FILE] = str(folder / "progress")
    if order["secret"]:
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_bytes(bytes.fromhex(order["secret"]))
        environment[_SECRET_FILE] = str(secret)
    os.chdir(_encoded(order["directory"]))
    # The launcher's bytes, whatever the locale here.
    return guard.start(
        [sys.executable, *map(_encoded, order["arguments"])],
        env=os.environb | {_encoded(n): _encoded(v) for n, v in environment.items()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


class _HostGuard:
    """The loop between the pipe and the command; one thread, no lock."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        order: dict[str, Any],
        inbox: Frames,
        outbox: Outbox,
        progress: Path,
    ) -> None:
        assert child.stdout is not None, "it is a pipe"
        assert child.stderr is not None, "it is a pipe"
        self._child = child
        self._lost_after_s = order["lost_after_s"]
        self._beat_s = order["beat_s"]
        self._inbox, self._outbox, self._progress = inbox, outbox, progress
        self._streams = {
            child.stdout.fileno(): frames.OUT,
            child.stderr.fileno(): frames.ERR,
        }
        self._exited = os.pidfd_open(child.pid)
        # Not `child.returncode`: a signal for one that is gone sets that.
        self._has_ended = False
        self._received_s = self._sent_s = time.monotonic()

    def run(self, watched: int) -> None:
        """Return once the command has ended and that was written, or nobody reads.

        Args:
          watched: A pidfd; also return when its process has ended.
        """
        self._outbox.put(frame(frames.BEGUN))
        while not self._has_ended or self._outbox:
            ready = self._wait(watched)
            if watched in ready or not self._receives(0 in ready):
                return
            for descriptor in ready & self._streams.keys():
                self._pass_on(descriptor)
            if self._exited in ready:
                self._end()
            if time.monotonic() - self._sent_s >= self._beat_s:
                self._sent_s = time.monotonic()
                self._outbox.put(frame(frames.BEAT, self._safe_step()))
            self._outbox.flush()

    def _wait(self, watched: int) -> set[int]:
        poll = select.poll()
        for descriptor in (0, watched):
            poll.register(descriptor, select.POLLIN)
        if self._outbox:
            poll.register(self._outbox.descriptor, select.POLLOUT)
        if not self._has_ended:
            poll.register(self._exited, select.POLLIN)
        # A launcher whose terminal takes nothing holds the command up, as on one host.
        if not self._outbox.is_full:
            for descriptor in self._streams:
                poll.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in poll.poll(self._beat_s * 1e3)}

    def _receives(self, is_ready: bool) -> bool:
        """Take what has come; return False if the launcher is gone, or was silent."""
        now_s = time.monotonic()
        data = read_some(0) if is_ready else None
        if data is None:
            # What has come meanwhile counts, however late this process looks.
            return now_s - self._received_s < self._lost_after_s
        self._received_s = now_s
        for kind, payload in self._inbox.feed(data):
            if kind == frames.SIGNAL:
                self._child.send_signal(int(payload))
        return bool(data)

    def _pass_on(self, descriptor: int) -> None:
        if data := read_some(descriptor):
            self._outbox.put(frame(self._streams[descriptor], data))
        else:
            del self._streams[descriptor]

    def _end(self) -> None:
        self._has_ended = True
        code = self._child.wait()
        # All that could write is dead after this: the pipes hold what is left.
        guard.sweep_children()
        for descriptor, kind in self._streams.items():
            os.set_blocking(descriptor, False)
            while data := read_some(descriptor):
                self._outbox.put(frame(kind, data))
        self._streams.clear()
        self._outbox.put(frame(frames.BEAT, self._safe_step()))
        self._outbox.put(frame(frames.ENDED, str(code).encode()))

    def _safe_step(self) -> bytes:
        with contextlib.suppress(OSError):
            if (step := self._progress.read_bytes()).isdigit():
                return step
        return b""
