"""Run a worker's node in a context, with errors that name their edges."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from replicator.base.types import PyTree
from replicator.errors import NodeFailedError, RemoteError, RpcError
from replicator.launchpad_bridge.launch_types import LaunchType
from replicator.launchpad_bridge.protocols import (
    Executable,
    Exited,
    NodeContext,
    Resources,
)
from replicator.launchpad_bridge.running.node_context import RunningContext
from replicator.launchpad_bridge.running.python_process import set_flags
from replicator.launchpad_bridge.running.stopping import finish_handlers

_EDGE = "On the edge "
_LONGEST_CHAIN = 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A worker that a node calls.

    Attributes:
      name: Name of the worker.
      calls_back: Whether it has, directly or not, a handle of the caller.
    """

    name: str
    calls_back: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeRun:
    """The `run` of an `Executable`.

    Attributes:
      node: Node to run.
      function: Runs the node.
      name: Name of the worker.
      run_id: Unique id of the run.
      resources: Resources of the group.
      targets: Workers that it calls, by planned address.
      launch_type: Launch type of the program; None for the launcher's name.
      flags: absl flags to set first, where the worker has a process of its own.
      own_process: Whether it has one even if others are threads.
    """

    node: Any
    function: Callable[[], PyTree]
    name: str
    run_id: str
    resources: Resources
    targets: Mapping[str, Target]
    launch_type: LaunchType | str | None = None
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    own_process: bool = False

    def __call__(self, context: NodeContext) -> PyTree:
        """Run the node to its end; return its result."""
        running = RunningContext(
            context,
            run_id=self.run_id,
            launch_config=self.resources,
            launch_type=self.launch_type,
        )
        set_flags(self.flags)
        self._forget_run()
        with running.entered():
            try:
                result = self.function()
            except BaseException as error:
                self._name_edges(error)
                raise
            finally:
                self._forget_run()
            finish_handlers(running)
            return result

    def _forget_run(self) -> None:
        # A restarted worker begins with a new object, and the memory of one that has
        # ended, such as arrays on devices, is freed.
        forget_run = getattr(self.node, "forget_run", None)
        if callable(forget_run):
            forget_run()

    def _name_edges(self, error: BaseException) -> None:
        """Add the edge, caller and target, to the error of a failed call."""
        for failed in _rpc_errors(error):
            text = str(failed)
            for address, target in self.targets.items():
                if address in text:
                    note = f"{_EDGE}{self.name} -> {target.name}"
                    if not isinstance(failed, RemoteError):
                        note += _why_not_ready(address, target, self.name)
                    error.add_note(note)
                    return


def run_worker(executable: Executable, attempt: int, context: NodeContext) -> Exited:
    """Run an executable in this thread, to its end; return its outcome.

    `sys.exit()` ends a node well, `sys.exit(1)` is a failure, as in a process of its
    own.
    """
    try:
        result = executable.run(context)
    except SystemExit as error:
        if error.code in (None, 0):
            return _ended(executable, attempt, context, None)
        failed = NodeFailedError(
            f"`{executable.name}` left with sys.exit({error.code!r})",
            node=executable.name,
        )
        failed.__cause__ = error
        return _raised(executable, attempt, failed)
    except BaseException as error:
        return _raised(executable, attempt, error)
    return _ended(executable, attempt, context, result)


def edge_of(error: BaseException) -> str:
    """Return the note of an error that names its edge; "" for none.

    >>> error = ValueError()
    >>> error.add_note("On the edge actor -> learner")
    >>> edge_of(error)
    'On the edge actor -> learner'
    """
    for note in getattr(error, "__notes__", ()):
        if note.startswith(_EDGE):
            return note
    return ""


def _ended(
    executable: Executable, attempt: int, context: NodeContext, result: PyTree
) -> Exited:
    asked = context.stop_event.is_set()
    return Exited(
        name=executable.name,
        attempt=attempt,
        outcome="stopped" if asked else "returned",
        result=result,
    )


def _raised(executable: Executable, attempt: int, error: BaseException) -> Exited:
    return Exited(name=executable.name, attempt=attempt, outcome="raised", error=error)


def _rpc_errors(error: BaseException | None) -> Iterator[RpcError]:
    """Yield the failed calls among an error and its causes."""
    for _ in range(_LONGEST_CHAIN):
        if error is None:
            return
        if isinstance(error, RpcError):
            yield error
        error = error.__cause__ or error.__context__


def _why_not_ready(address: str, target: Target, caller: str) -> str:
    """Return the possible reasons why a server does not listen; "" if it does."""
    sockets = [a[5:] for a in address.split(",") if a.startswith("unix:")]
    if not sockets or any(os.path.exists(path) for path in sockets):
        return ""
    why = f": {target.name} does not listen. Either its constructor has not returned"
    if target.calls_back:
        why += (
            f" (it has a handle of {caller}: constructors that call each other wait "
            "forever; call in `run`)"
        )
    return f"{why}, or it has ended."
