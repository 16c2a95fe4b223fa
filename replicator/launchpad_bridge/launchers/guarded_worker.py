"""One start of a worker by a command, under a guard; pipes lead to it and back.

    launcher ── "stop"; the end of it: die ──> standard input of the command
    launcher <── the result, or the error ──── its standard output

What the node prints goes to standard error, and so to the worker's log. When the
launcher dies its end of the pipe closes, and the worker ends itself, wherever it is.
"""

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from replicator.distributed.processes.exits import count_memory_kills
from replicator.distributed.processes.guarded import GuardedProcess
from replicator.errors import DecodeError, LaunchError
from replicator.launchpad_bridge.launchers.worker_logs import (
    begin_attempt,
    last_lines,
    open_log,
)
from replicator.launchpad_bridge.launchers.worker_reports import (
    STOP,
    Frame,
    FrameReader,
)

_READ_BYTES = 1 << 20

OnEnd: TypeAlias = Callable[[Frame | None, Mapping[str, Any], list[str]], None]
"""Takes a worker's last word, how its command ended, and the last lines it printed."""


class GuardedWorker:
    """A worker behind a command that passes on input and output.

    Args:
      words: The command; its end runs `worker_process.main`.
      name: The worker's.
      attempt: Which start it is.
      log: Where its output goes.
      owner: As of a `GuardedProcess`; `environ`, `folder` and `keep` likewise.
      environ: See `owner`.
      folder: See `owner`.
      keep: See `owner`.
      on_stop_asked: Called when the worker asks for a stop, with whose: as of a
        `StopAsked`.
      on_end: Called once it has ended, in the thread that listens to it.

    Raises:
      LaunchError: The command cannot be run.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        name: str,
        attempt: int,
        log: Path,
        owner: str,
        environ: Mapping[str, str],
        folder: Path,
        keep: Sequence[Path] = (),
        on_stop_asked: Callable[[Literal["run", "unit"]], None],
        on_end: OnEnd,
    ) -> None:
        self._log = log
        self._log_start = begin_attempt(log, attempt)
        self._on_stop_asked = on_stop_asked
        self._on_end = on_end
        # Set by the driver's thread, or by the listening one; read once it has ended.
        self._is_killed = False
        self._memory_kills = count_memory_kills()
        # Of standard input, which the driver's thread and the listening one may close.
        self._sending = threading.Lock()
        try:
            with os.fdopen(open_log(log), "ab") as file:
                self._process = GuardedProcess(
                    words,
                    owner=owner,
                    environ=environ,
                    folder=folder,
                    keep=keep,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                )
        except OSError as error:
            raise LaunchError(f"`{name}` cannot be started: {error}.") from error
        self._thread = threading.Thread(
            target=self._listen, name=f"worker {name}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Set the node's stop event; returns at once."""
        assert self._process.stdin is not None, "a pipe"
        # A worker that has ended needs no words.
        with self._sending, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(STOP)

    def kill(self) -> None:
        """End the worker and the command; returns at once."""
        self._is_killed = True
        self._hang_up()
        self._process.end()

    def close(self, timeout_s: float = 5.0) -> None:
        """Kill what still runs, and wait until that is reported."""
        if self._thread.is_alive():
            self.kill()
        self._thread.join(timeout_s)
        self._hang_up()

    def _hang_up(self) -> None:
        assert self._process.stdin is not None, "a pipe"
        with self._sending, contextlib.suppress(OSError):
            self._process.stdin.close()

    def _listen(self) -> None:
        said, heard = self._heard()
        end = said.log_bytes if said and said.raised else None
        self._on_end(said, heard, last_lines(self._log, self._log_start, end))

    def _heard(self) -> tuple[Frame | None, dict[str, Any]]:
        """Read until the command has ended; return its last word, and how that was."""
        assert self._process.stdout is not None, "a pipe"
        reader, said, wrong = FrameReader(), None, {}
        with self._process.stdout as pipe:
            try:
                while data := os.read(pipe.fileno(), _READ_BYTES):
                    for frame in reader.feed(data):
                        if frame.asks:
                            self._on_stop_asked(frame.asks)
                        else:
                            said = frame
            except DecodeError as error:
                wrong = {"reason": f"sent what is no report: {error}"}
                self.kill()
        code = self._process.wait()
        heard = {
            "pid": self._process.pid,
            "code": code,
            "is_killed": self._is_killed,
            "out_of_memory": count_memory_kills() > self._memory_kills,
        }
        return said, {**heard, **wrong}
