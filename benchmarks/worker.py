"""Ask another process, which may die or hang without taking ours along.

One line in, a request as JSON; one line out, its answer. A process that ends (a
compiler aborts; replicas wait for each other in vain) or answers too late is replaced
at the next request.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

_MARK = "answer: "
# Hundreds of programs are compiled and run a few times: machine code may be slow. What
# XLA makes of a program, reductions included, is the same.
FAST_COMPILER = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)


class WorkerEnded(Exception):
    """The process ended before it answered."""


class Worker:
    """A process that answers; close it when done.

    Args:
      arguments: Of Python: a module that calls `serve`.
      timeout_s: How long one answer may take.
    """

    def __init__(self, arguments: Sequence[str], *, timeout_s: float) -> None:
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: Any) -> Any:
        """Return the answer to a request.

        Raises:
          WorkerEnded: The process ended, of itself or because it was late.
        """
        process = self._process or self._started()
        assert process.stdin is not None  # both are pipes
        assert process.stdout is not None
        late = threading.Timer(self._timeout_s, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith(_MARK):
                    return json.loads(line.removeprefix(_MARK))
        except BrokenPipeError:
            pass
        finally:
            late.cancel()
        self._process = None
        process.communicate()
        raise WorkerEnded(f"the process ended with {process.returncode}")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()

    def _started(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": FAST_COMPILER},
        )
        return self._process


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer the lines of standard input, one after the other."""
    for line in sys.stdin:
        print(_MARK + json.dumps(answer(json.loads(line))), flush=True)
