"""Start second processes that serve until they are let go, and read what they say.

Each writes one line when it is ready, and ends when its standard input does: so none
outlives the benchmark, however that ends.
"""

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from benchmarks.cores import on_core

READY_S = 60.0
_END_S = 10.0
_NONE: Mapping[str, str] = MappingProxyType({})


class Child:
    """A process that was started here.

    Args:
      process: It, with pipes for standard input and output.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None, "started with pipes"
        assert process.stdout is not None
        self.process = process
        self._orders, self._said = process.stdin, process.stdout
        self._rest = b""

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self.process.pid

    def tell(self, line: str) -> None:
        """Write a line to it."""
        self._orders.write(f"{line}\n".encode())
        self._orders.flush()

    def read_line(self, *, timeout_s: float = READY_S) -> str:
        """Return the next line that it writes.

        Raises:
          RuntimeError: It ended, or wrote none in time.
        """
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._said], [], [], timeout_s)
            found = os.read(self._said.fileno(), 1 << 16) if ready else b""
            if not found:
                what = "ended" if ready else f"said nothing for {timeout_s:.0f} s"
                raise RuntimeError(f"{self.process.args} {what}.")
            self._rest += found
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()

    def end(self) -> None:
        """Let it go; kill it if it does not."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_END_S)
        self._said.close()


@contextlib.contextmanager
def started(
    module: str,
    *arguments: str,
    shows_errors: bool = True,
    core: int | None = None,
    variables: Mapping[str, str] = _NONE,
) -> Iterator[Child]:
    """Run `python -m module` while the block lasts.

    Args:
      module: What runs.
      *arguments: Its own.
      shows_errors: Whether its standard error goes where ours does.
      core: Where all of its threads run; None: wherever this one may.
      variables: Of its environment, besides ours.
    """
    with on_core(core):  # a process starts out with the cores of who started it
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if shows_errors else subprocess.DEVNULL,
            env={**os.environ, **variables},
        )
    child = Child(process)
    try:
        yield child
    finally:
        child.end()


def wait_until_let_go() -> None:
    """Wait, in the child, until its parent lets it go or is gone."""
    sys.stdin.read()
