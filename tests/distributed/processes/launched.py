"""A launcher as a user starts it, and what became of everything below it."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import uuid

# Generous: two cores may be shared by many.
LONG_S = 300.0
_UNSET = ("REPLICATOR_FAKE_DEVICES", "XLA_FLAGS", "JAX_PLATFORMS", "NPROC")


class Launched:
    """`replicator launch` in a session of its own; leaving kills all that is left.

    What it starts, however far below, bears a mark in its environment. `command` stands
    for the whole command line, where it is another one.
    """

    def __init__(self, *words, environ=(), command=None):
        self._mark = f"REPLICATOR_TEST_MARK={uuid.uuid4()}"
        name, _, value = self._mark.partition("=")
        kept = {key: text for key, text in os.environ.items() if key not in _UNSET}
        self._process = subprocess.Popen(
            command
            or [sys.executable, "-m", "replicator.cli", "launch", *map(str, words)],
            env={**kept, **dict(environ), name: value, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.lines = []
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pid in {self.pid, *self.alive()}:
            kill(pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if any(error):
            print(self.text)  # pytest shows it

    def _read(self):
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.lines.append((time.monotonic(), line.rstrip("\n")))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    @property
    def text(self):
        return "\n".join(line for _, line in self.lines)

    def wait_for(self, phrase, *, count=1):
        """Wait until so many lines hold a phrase; return when each came, and each."""

        def found():
            return [entry for entry in self.lines if phrase in entry[1]]

        with self._news:
            come = self._news.wait_for(
                lambda: len(found()) >= count or self._ended, LONG_S
            )
            assert come, f"no {phrase!r} in time:\n{self.text}"
            assert len(found()) >= count, f"no {phrase!r}:\n{self.text}"
            return found()

    def pid_of(self, rank, attempt=0):
        """Wait until a process says `here ATTEMPT PID`, and return the id."""
        [(_, line), *_] = self.wait_for(f"[{rank}] here {attempt} ")
        return int(line.split()[-1])

    def tell(self, number):
        kill(self.pid, number)

    def wait(self):
        """Wait for the launcher's end; return its exit code."""
        code = self._process.wait(LONG_S)
        self._reader.join(LONG_S)
        return code

    def alive(self):
        """List the processes that bear the mark, the launcher apart."""
        marked = set()
        for environ in pathlib.Path("/proc").glob("[0-9]*/environ"):
            try:
                if self._mark.encode() in environ.read_bytes():
                    marked.add(int(environ.parent.name))
            except (OSError, ProcessLookupError):
                continue
        return marked - {self.pid}

    def wait_until_none_is_left(self):
        until_s = time.monotonic() + LONG_S
        while self.alive():
            assert time.monotonic() < until_s, f"still there: {self.alive()}"
            time.sleep(0.01)


def kill(pid, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def script(folder, code):
    """Write a script that says where it is, then runs `code`."""
    path = folder / "train.py"
    path.write_text(
        "import os, signal, subprocess, sys, time\n"
        'attempt = int(os.environ["REPLICATOR_ATTEMPT"])\n'
        'rank = int(os.environ.get("REPLICATOR_PROCESS_ID", "0"))\n'
        'print("here", attempt, os.getpid(), flush=True)\n' + code
    )
    return path
