"""One process of a group on another host, as its launcher has it.

    guard ── ssh ──────── sshd ── host guard ── the command
     │ frames, and beats, both ways    └── ends all when the pipe does, or is silent

ssh runs under a guard of this host as any process of a group does: it ends with this
launcher, and with it the pipe, and with that all on the other host.
"""

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from replicator.distributed.processes.exits import describe_code
from replicator.distributed.processes.guard import KILLED_BY_LAUNCHER
from replicator.distributed.processes.guarded import GuardedProcess
from replicator.distributed.processes.output import LabelledText, write_lines
from replicator.distributed.processes.policy import ProcessEnd
from replicator.distributed.remote import frames
from replicator.distributed.remote.bundle import source_line
from replicator.distributed.remote.failures import describe_unusable
from replicator.distributed.remote.frames import Frames, frame, read_some

_LONGEST_BEAT_S = 10.0
# ssh has `CONNECT_S` for its part; a login, and the start of Python, may be slow.
_START_S = 60.0


class HostMember:
    """A process that was started on a host; a `Worker`.

    Args:
      rank: Its number in the group.
      host: Name of the host in messages.
      connection: Command that runs the host guard there.
      order: What it is to run (`host_guard.py`), but for the times of beats.
      lost_after_s: Seconds without a beat after which the other end is gone.
      was_used: Whether the host could be used in an earlier attempt.
      folder: A folder of the launcher's.
      progress: Takes the steps that it reports as safe; called in a thread.
      signal_asked: Returns the signal by which the group was asked to stop.
      report: Takes its end, once; called in a thread.

    Attributes:
      was_used: Whether the host could be used, now or in an earlier attempt.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        connection: Sequence[str],
        order: dict[str, Any],
        *,
        lost_after_s: float,
        was_used: bool,
        folder: Path,
        progress: Callable[[int], None],
        signal_asked: Callable[[], int],
        report: Callable[[ProcessEnd], None],
    ) -> None:
        self._rank, self._host = rank, host
        self._lost_after_s = lost_after_s
        self._beat_s = min(_LONGEST_BEAT_S, lost_after_s / 4)
        self._progress, self._report = progress, report
        self._signal_asked = signal_asked
        self._kills = 0  # of the driver's thread alone
        # Of `_watch` alone, but for the last, the driver's; others may read them.
        self._has_begun, self.was_used = False, was_used
        self._code: int | None = None
        self._refused = self._how_lost = ""
        self._code_if_killed = KILLED_BY_LAUNCHER
        label = f"[{rank}] "
        self._out = LabelledText(label, sys.stdout.buffer)
        self._err = LabelledText(label, sys.stderr.buffer)
        self._pipes = [os.pipe(), os.pipe()]
        try:
            self._process = GuardedProcess(
                connection,
                owner=folder.name,
                environ=os.environ,
                folder=folder,
                stdin=subprocess.PIPE,
                stdout=self._pipes[0][1],
                stderr=self._pipes[1][1],
            )
        finally:
            for _, written in self._pipes:
                os.close(written)
        times = {"lost_after_s": lost_after_s, "beat_s": self._beat_s}
        sent = json.dumps({**order, **times}).encode()
        # Bytes for the host, in order; None ends the pipe. `_send` alone takes them.
        self._to_host: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._to_host.put(source_line() + frame(frames.ORDER, sent))
        # Daemons, as ssh may be stuck. A terminal that takes nothing holds up `_watch`
        # and then the process, but not `_send`: beats go on.
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        threading.Thread(target=self._send, daemon=True).start()

    def stop(self) -> None:
        """Send the command the signal that asked for the stop."""
        if self._has_begun:
            self._to_host.put(frame(frames.SIGNAL, b"%d" % self._signal_asked()))
        else:  # nothing runs there that could save anything
            self._code_if_killed = -self._signal_asked()
            self.kill()

    def kill(self) -> None:
        """Have the host end all of it; the second time give up its host."""
        self._kills += 1
        self._to_host.put(None)
        if self._kills > 1:
            self._process.end()
        if self._kills > 2:
            self._process.kill()

    def join(self, timeout_s: float) -> None:
        """Wait until its end is reported, but no longer than a time."""
        self._thread.join(timeout_s)

    def _send(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None, "it is a pipe"
        # Nobody reads it once ssh is gone, which `_watch` sees.
        with contextlib.suppress(BrokenPipeError), stdin:
            while True:
                try:
                    data = self._to_host.get(timeout=self._beat_s)
                except queue.Empty:
                    data = frame(frames.BEAT)
                if data is None:
                    return
                view = memoryview(data)
                while view:
                    view = view[stdin.write(view) :]

    def _watch(self) -> None:
        inbox = Frames(frames.PREAMBLE)
        printed = LabelledText(f"[{self._rank}] ", sys.stderr.buffer)  # by ssh itself
        takers = {
            self._pipes[0][0]: lambda data: self._take(inbox.feed(data)),
            self._pipes[1][0]: printed.feed,
        }
        for descriptor in takers:
            os.set_blocking(descriptor, False)
        try:
            self._pass_on(takers)
            code = self._process.close()
            # What the pipes still hold, now that nobody writes to them.
            for descriptor, take in takers.items():
                while data := read_some(descriptor):
                    take(data)
        except ValueError as error:
            self._how_lost = f"sent what is no frame, {error}"
            code = self._process.close()
        self._to_host.put(None)
        for descriptor in takers:
            os.close(descriptor)
        for text in (printed, self._out, self._err):
            text.end()
        lines = [line.decode(errors="replace") for line in printed.last_lines()]
        self._report(self._end(code, lines))

    def _pass_on(self, takers: Mapping[int, Callable[[bytes], None]]) -> None:
        """Take what comes until ssh has exited, or end it after a long silence."""
        frames_from = next(iter(takers))
        poll = select.poll()
        for descriptor in (self._process.exited, *takers):
            poll.register(descriptor, select.POLLIN)
        received_s = time.monotonic()
        ready: set[int] = set()
        while self._process.exited not in ready:
            ready = {descriptor for descriptor, _ in poll.poll(self._beat_s * 1e3)}
            # Before a terminal may hold up this thread: what comes meanwhile counts.
            now_s = time.monotonic()
            for descriptor in ready & takers.keys():
                data = read_some(descriptor)
                if data:
                    takers[descriptor](data)
                else:  # at its end a pipe is always ready
                    poll.unregister(descriptor)
            if frames_from in ready:
                received_s = time.monotonic()
                continue
            longest_s = self._lost_after_s if self._has_begun else _START_S
            if now_s - received_s > longest_s:
                self._how_lost = f"timed out, silent for {longest_s:g} s"
                self._process.end()

    def _take(self, arrived: Sequence[tuple[bytes, bytes]]) -> None:
        for kind, payload in arrived:
            if kind == frames.BEGUN:
                self._has_begun = self.was_used = True
            elif kind == frames.OUT:
                self._out.feed(payload)
            elif kind == frames.ERR:
                self._err.feed(payload)
            elif kind == frames.BEAT and payload:
                self._progress(int(payload))
            elif kind == frames.REFUSED:
                self._refused = payload.decode(errors="replace")
            elif kind == frames.ENDED:
                self._code = int(payload)

    def _end(self, code: int, printed: list[str]) -> ProcessEnd:
        if self._code is not None:
            return ProcessEnd(self._rank, self._code, self._err.last_lines())
        if self._kills:
            lines = self._err.last_lines()
            return ProcessEnd(self._rank, self._code_if_killed, lines)
        text, comes_again = self._describe(code, printed)
        lines = [text.encode()]
        write_lines(sys.stderr.buffer, f"[{self._rank}] ", lines)
        return ProcessEnd(self._rank, 1, lines, comes_again=comes_again)

    def _describe(self, code: int, printed: list[str]) -> tuple[str, bool]:
        """Describe a connection that ended before the process did."""
        if self._refused:
            return (
                f"host `{self._host}` must have this one's folder and Python, and free "
                f"disk, got {self._refused!r}. Copy the folder, name `python_venv`, or "
                "free some."
            ), not self.was_used
        if not self._has_begun:
            printed += [self._how_lost] if self._how_lost else []
            return describe_unusable(self._host, printed, was_used=self.was_used)
        how = self._how_lost or f"cut off ({describe_code(code)})"
        return f"host `{self._host}` is lost: {how}", False
