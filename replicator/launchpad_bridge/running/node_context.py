"""Context of a running node: its program, worker and stop event, for code in it.

A thread that runs a node has a context of its own. Other threads of the node (handlers
of its server, threads it started) have none; they use the one of their process if there
is only one, as under processes and on a cluster.

    root context       of a worker; made where the worker starts
    inner context      of a node colocated in it: the same, with its own stop event
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from replicator.errors import LaunchError
from replicator.launchpad_bridge.launch_types import LaunchType, launch_type_of
from replicator.launchpad_bridge.protocols import NodeContext, Resources
from replicator.launchpad_bridge.running import exit_status
from replicator.launchpad_bridge.running.node_watchdog import fail_node
from replicator.launchpad_bridge.running.stop_event import StopEvent, mirrored

_THREAD = threading.local()
# Guards `_ROOTS`; nothing else is called while it is held.
_LOCK = threading.Lock()
_ROOTS: set["RunningContext"] = set()


class RunningContext:
    """The context of a node that runs; a `NodeContext`, and Launchpad's attributes.

    Attributes:
      program: The program's name.
      worker: The worker's name: "label" or "label/index".
      launcher: The launcher's name: "threads", "processes", "test", "ray".
      attempt: Number of this start of the worker: 0 for the first.
      run_id: Unique id of the run.
      address_book: The launcher's address book; None if addresses are as planned.
      exchange: The launcher's own implementation of calls; None for `rpc`.
      by_reference: Whether calls within this process need not copy their arguments.
    """

    def __init__(
        self,
        base: NodeContext,
        *,
        run_id: str,
        launch_config: Resources | None = None,
        launch_type: LaunchType | str | None = None,
        parent: "RunningContext | None" = None,
    ) -> None:
        self._base = base
        self.program = base.program
        self.worker = base.worker
        self.launcher = base.launch_type
        self.attempt = base.attempt
        # Few launchers offer these.
        self.address_book: Any = getattr(base, "address_book", None)
        self.exchange: Any = getattr(base, "exchange", None)
        self.by_reference: bool = getattr(base, "by_reference", False)
        self._launch_type = launch_type
        self.run_id = run_id
        self.launch_config = launch_config or Resources()
        self.root: RunningContext = self if parent is None else parent.root
        # Set by the node's thread at its end, for a watchdog that waits in `fail`.
        self._over = threading.Event()
        self._thread = threading.current_thread()  # the node's, once it is entered
        self.stop_event = (
            self._inner_event()
            if parent
            else mirrored(base.stop_event, over=self._over)
        )
        self._at_end: list[Callable[[], None]] = []
        self.stop_handlers: list[Any] = []

    @property
    def launch_type(self) -> LaunchType | str:
        """Return Launchpad's launch type; the launcher's name if it has none."""
        if self._launch_type is not None:
            return self._launch_type  # two of Launchpad's types have one launcher
        with contextlib.suppress(ValueError):
            return LaunchType(self.launcher)
        return self.launcher

    @property
    def program_stopper(self) -> Callable[..., None]:
        """Return a function that stops the program; it can be pickled."""
        return ProgramStopper()

    def stop_program(self) -> None:
        """Ask for the whole run to stop; returns at once."""
        self._base.stop_program()

    def fail(self, report: str) -> None:
        """End the node with an error, from another thread: a watchdog of a run in it.

        Args:
          report: Text of the error.
        """
        fail_node(
            self._thread,
            self._over,
            report,
            node=self.worker,
            stop_program=self.stop_program,
            others=self._others,
        )

    def _others(self) -> list[str]:
        """Return the names of the other workers in this process."""
        with _LOCK:
            return sorted(root.worker for root in _ROOTS if root is not self.root)

    def _inner_event(self) -> StopEvent:
        return StopEvent() if self.exchange is None else self.exchange.stop_event()

    def when_over(self, close: Callable[[], None]) -> None:
        """Call `close` when the worker has ended."""
        self._at_end.append(close)

    def inner(self) -> "RunningContext":
        """Return a context for a node colocated in this one."""
        return RunningContext(
            self._base,
            run_id=self.run_id,
            launch_config=self.launch_config,
            launch_type=self._launch_type,
            parent=self,
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be the context of this thread, and of the process if it is the only one."""
        if self.root is self:
            with _LOCK:
                _ROOTS.add(self)
        before = of_thread()
        _THREAD.context = self
        self._thread = threading.current_thread()
        try:
            yield
        finally:
            _THREAD.context = before
            if self.root is self:
                with _LOCK:
                    _ROOTS.discard(self)
            self._over.set()
            while self._at_end:
                self._at_end.pop()()

    def applied_to(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs with this as the context of its thread."""

        def in_context(*args: Any, **kwargs: Any) -> Any:
            before = getattr(_THREAD, "context", None)
            _THREAD.context = self
            try:
                return function(*args, **kwargs)
            finally:
                _THREAD.context = before

        return in_context


@dataclasses.dataclass(frozen=True)
class ProgramStopper:
    """Stops the program of the node that calls it; can be pickled."""

    def __call__(self, mark_as_completed: bool = False) -> None:
        """Ask for the whole run to stop; returns at once."""
        stop()


class LooseContext:
    """The `NodeContext` of a node that no launcher runs: in a test of that node."""

    program = "(none)"
    worker = "(loose)"
    launch_type = "threads"
    attempt = 0

    def __init__(self) -> None:
        self.stop_event = StopEvent()

    def stop_program(self) -> None:
        """Stop this node, the only one."""
        self.stop_event.set()


def loose_context() -> RunningContext:
    """Return a context for a node that no launcher runs."""
    return RunningContext(LooseContext(), run_id="")


class LaunchContext:
    """Launch settings of a node before it runs; the launcher fills them in."""

    def __init__(self) -> None:
        self._known: tuple[LaunchType | str, Any, Callable[..., None]] | None = None

    def initialize(
        self,
        launch_type: LaunchType | str,
        launch_config: Any,
        program_stopper: Callable[..., None] | None = None,
    ) -> None:
        """Set all values; called by the launcher."""
        self._known = launch_type, launch_config, program_stopper or ProgramStopper()

    @property
    def launch_type(self) -> LaunchType | str:
        """Return the launch type of the program."""
        return self._checked()[0]

    @property
    def launch_config(self) -> Any:
        """Return the resources of the node's group."""
        return self._checked()[1]

    @property
    def program_stopper(self) -> Callable[..., None]:
        """Return a function that stops the program."""
        return self._checked()[2]

    def _checked(self) -> tuple[LaunchType | str, Any, Callable[..., None]]:
        if self._known is None:
            raise LaunchError(
                "Launch context is not yet initialized. It should be initialized by "
                "calling initialize() at launch time."
            )
        return self._known


def of_thread() -> RunningContext | None:
    """Return the context of this thread; None if it runs no node itself."""
    return getattr(_THREAD, "context", None)


def current() -> RunningContext | None:
    """Return the context of this thread, or the only one of this process, or None."""
    context = of_thread()
    if context is not None:
        return context
    with _LOCK:
        return next(iter(_ROOTS)) if len(_ROOTS) == 1 else None


def get_context() -> RunningContext:
    """Return the context of the node that this thread runs.

    Raises:
      LaunchError: It runs none.
    """
    context = current()
    if context is None:
        raise LaunchError(
            "Launchpad context was not instantiated. Do you try to access it outside "
            "of the main node's thread? Ask for it there, and hand it on."
        )
    return context


def known_programs() -> dict[str, tuple[str, Callable[[], None]]]:
    """Return the programs that run or have workers here: name, and how to stop it."""
    launched = {r.run_id: (r.program, r.stop) for r in exit_status.live_runs()}
    with _LOCK:
        working = {root.run_id: (root.program, root.stop_program) for root in _ROOTS}
    return {**launched, **working}


def forget_run(run_id: str) -> None:
    """Forget the contexts of threads that a run left behind at its end."""
    with _LOCK:
        _ROOTS.difference_update({r for r in _ROOTS if r.run_id == run_id})


def stop() -> None:
    """Stop the program: from any node, any thread or handler of it, or its launcher.

    Returns at once; all nodes are asked to stop, and the run's `wait` returns.

    Raises:
      LaunchError: No program runs here, or several do and it is not clear which.
    """
    context = of_thread()
    if context is not None:
        context.stop_program()
        return
    programs = known_programs()
    if len(programs) == 1:
        (_, stop_program) = next(iter(programs.values()))
        stop_program()
        return
    if not programs:
        raise LaunchError(
            "`lp.stop()` must be called while a program runs in this process, got "
            "none. Call it in a node, or `run.stop()` on what `lp.launch` returned."
        )
    names = ", ".join(sorted(name for name, _ in programs.values()))
    raise LaunchError(
        "`lp.stop()` must know which program is meant, got a thread that belongs to "
        f"none of {names}. Call it in a node's own thread, or `run.stop()`."
    )


def make_program_stopper(launch_type: LaunchType | str) -> ProgramStopper:
    """Return a function, which can be pickled, that stops the program it is called in.

    Args:
      launch_type: Launch type of the program; any.

    Raises:
      ArgumentError: There is no such launch type.

    >>> make_program_stopper("threads")
    ProgramStopper()
    """
    launch_type_of(launch_type)
    return ProgramStopper()
