"""Save and restore in several processes together.

Each process writes its shards; process 0, the chief, makes the folder before, and gives
it its name behind them all. So all processes must see the directory. An error of one is
raised in all of them: they go on together, or end together.
"""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replicator.checkpoint.disk import Disk
from replicator.distributed.agreement import Json, exchange
from replicator.distributed.coordination import process_count, process_index
from replicator.errors import (
    BucketError,
    CheckpointError,
    CheckpointInUseError,
    CheckpointMismatchError,
    ReplicatorError,
)

_KNOWN = (BucketError, CheckpointInUseError, CheckpointMismatchError)
_numbers = itertools.count()


class Group:
    """The processes that save to one directory; all open their stores in one order.

    Args:
      together: Whether there are other processes; by default, if the program has any.
      timeout_s: Longest wait for one of them, in seconds.
    """

    def __init__(self, *, together: bool | None, timeout_s: float) -> None:
        self.together = process_count() > 1 if together is None else together
        self.process = process_index()
        self.processes = range(process_count()) if self.together else [self.process]
        self.is_chief = not self.together or self.process == 0
        self._timeout_s = timeout_s
        self._name = f"checkpoint-{next(_numbers)}" if self.together else ""

    def share(self, what: str, value: Any) -> list[Any]:
        """Return the values of all processes; a process that is alone gets its own.

        >>> Group(together=False, timeout_s=1.0).share("busy", True)
        [True]
        """
        if not self.together:
            return [value]
        return exchange(f"{self._name}/{what}", value, timeout_s=self._timeout_s)

    def lead(self, what: str, action: Callable[[], Json]) -> Any:
        """Call `action` in the chief; return its result in all processes.

        >>> Group(together=False, timeout_s=1.0).lead("count", lambda: 3)
        3

        Raises:
          CheckpointError: The chief failed; in the chief itself, its own error.
        """
        return self.gather(what, action if self.is_chief else _nothing)[0]

    def gather(self, what: str, action: Callable[[], Json]) -> list[Any]:
        """Call `action` in each process; return all results in all processes.

        >>> Group(together=False, timeout_s=1.0).gather("count", lambda: 3)
        [3]

        Raises:
          CheckpointError: One failed; in that process itself, its own error.
        """
        failure, value = None, None
        try:
            value = action()
        except Exception as error:  # sent to the others, then raised
            failure = error
        replies = self.share(what, {"value": value, "failure": _as_json(failure)})
        if failure is not None:
            raise failure
        for reply in replies:
            if reply["failure"] is not None:
                raise _from_json(*reply["failure"])
        return [reply["value"] for reply in replies]

    def require_all(self, what: str, failure: Exception | None) -> None:
        """Raise in all processes if one of them failed.

        >>> Group(together=False, timeout_s=1.0).require_all("restored", None)

        Raises:
          CheckpointError: One failed; in that process itself, `failure`.
        """
        replies = self.share(what, _as_json(failure))
        if failure is not None:
            raise failure
        for process, reply in enumerate(replies):
            if reply is not None:
                kind, text = reply
                raise _from_json(kind, f"Process {process}: {text}")


def require_shared(directory: Path, group: Group, disk: Disk) -> None:
    """Check that all processes see one directory: each writes a file, the first reads.

    Raises:
      CheckpointError: A process cannot write to it, or its file is not here.
    """
    if not group.together:
        return

    def write() -> str:
        path = directory / f".writing-{process_index()}-{os.urandom(4).hex()}"
        try:
            disk.write_file(path, path.name.encode())
        except OSError as failure:
            raise _not_shared(directory, str(failure)) from failure
        return path.name

    def read_all() -> None:
        for process, name in enumerate(names):
            path = directory / name
            if not path.exists() or path.read_bytes() != name.encode():
                raise _not_shared(directory, f"no file of process {process}")
            path.unlink()

    names = group.gather("shared", write)
    group.lead("all-shared", read_all)


def _not_shared(directory: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "A directory of checkpoints must be one that all processes can write to, got "
        f"{directory} and in process {process_index()}: {why}. Save to a file system "
        "that they share."
    )


def _nothing() -> None:
    """Stand in for the action of the chief in another process."""


def _as_json(failure: Exception | None) -> list[str] | None:
    return None if failure is None else [type(failure).__name__, str(failure)]


def _from_json(kind: str, text: str) -> ReplicatorError:
    classes = {known.__name__: known for known in _KNOWN}
    return classes.get(kind, CheckpointError)(text)
