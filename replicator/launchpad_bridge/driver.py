"""The thread that drives a run: events in, decisions of the supervisor performed.

It alone touches the supervisor's state, and opens, starts, stops and closes what the
launcher made; so a launcher needs no locks. It is no daemon: it ends with the run.
"""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

from replicator.base.types import PyTree
from replicator.distributed.processes import states
from replicator.distributed.processes.driver import Driver, Worker
from replicator.errors import LaunchError
from replicator.launchpad_bridge.planning import addresses_of
from replicator.launchpad_bridge.protocols import (
    Executable,
    Exited,
    Launcher,
    Plan,
    Workers,
)
from replicator.launchpad_bridge.running.exit_mapping import ended, first_failure

_LOG = logging.getLogger("replicator.launchpad_bridge")
_LAUNCHER = "the launcher"


class RunDriver(Driver):
    """Runs a plan with a launcher.

    Attributes:
      state: The supervisor's; replaced, never changed.
      results: What workers returned, by name.
      workers: What the launcher made; None before.
      finish: How the run ended; None while it has not.
    """

    def __init__(
        self,
        plan: Plan,
        launcher: Launcher,
        *,
        timeouts: states.Timeouts,
        on_event: Callable[[], None],
    ) -> None:
        """Make ready; nothing starts before `open`.

        Args:
          plan: What to run.
          launcher: Where.
          timeouts: How long to wait for what.
          on_event: Called after each event, in the driver's thread.
        """
        super().__init__(_units(plan.executables), timeouts)
        self.results: dict[str, PyTree] = {}
        self.finish: states.Finish | None = None
        self._plan = plan
        self._launcher = launcher
        self._on_event = on_event
        self.workers: Workers | None = None
        self._executables: Mapping[str, Executable] = {
            executable.name: executable for executable in plan.executables
        }
        self._goals = [each.name for each in plan.executables if each.ends_program]
        self._serving = [each.name for each in plan.executables if each.addresses]
        # Processes may be bound to die with the thread that started them: all are
        # started by this one, which lives as long as the run.
        self._thread = threading.Thread(target=self._drive, name=f"run {plan.program}")
        # One word of the driver's thread, for `open`, which waits for it.
        self._opened: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def open(self) -> BaseException | None:
        """Open the launcher; then start the workers, without waiting for that.

        Returns:
          Why the launcher cannot be opened, in which case all is over; or None.
        """
        self._thread.start()
        error = self._opened.get()
        if error is not None:
            self._thread.join()
        return error

    @property
    def goals_have_ended(self) -> bool:
        """Whether there were workers whom the others serve, and all have ended."""
        return bool(self._goals) and all(map(self._has_ended, self._goals))

    def join(self) -> None:
        """Wait until the driver's thread has ended."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _drive(self) -> None:
        try:
            self.workers = self._launcher.open(self._plan, self.report)
        except BaseException as error:
            self._opened.put(error)
            return
        self._opened.put(None)
        try:
            finish = self.run()
            if finish.failure is None and self.state is not None:
                finish = dataclasses.replace(finish, failure=first_failure(self.state))
        except BaseException as error:  # a launcher that breaks its promises
            _LOG.exception("%s: the run broke down", self._plan.program)
            finish = states.Finish(failure=_broken(error))
        self._close(finish)

    def to_ended(self, end: Exited, state: states.State) -> states.Ended:
        """Keep the result of a worker; return what its end is to the supervisor."""
        executable = self._executables.get(end.name)
        if executable is not None and end.outcome not in ("raised", "died"):
            # Before the state has the end: whoever waits for that reads this.
            self.results |= dict.fromkeys(_result_names(executable), end.result)
        return ended(
            end,
            is_member=executable is not None and executable.is_member,
            is_stopping=state.phase != "running",
            is_needed=not self.goals_have_ended,
            stop_grace_s=self.timeouts.stop_grace_s,
        )

    def _has_ended(self, name: str) -> bool:
        state = self.state
        return state is not None and state.worker(name).phase == "ended"

    def note(self) -> None:
        """Let clients here wait for no server that does not come again."""
        for name in [name for name in self._serving if self._has_ended(name)]:
            self._serving.remove(name)
            node = getattr(self._executables[name].run, "node", None)
            for address in addresses_of(node):
                address.builder.note_ended()
        self._on_event()

    def log(self, messages: Sequence[str]) -> None:
        """Log in one line what one event led to."""
        level = logging.INFO if _is_going_well(self.state) else logging.WARNING
        _LOG.log(level, "%s: %s", self._plan.program, "; ".join(messages))

    def start_worker(self, name: str, attempt: int) -> Worker | None:
        """Start one with the launcher; report one that does not start."""
        assert self.workers is not None, "opened before the first start"
        executable = self._executables[name]
        for key in _result_names(executable):  # of an attempt that is thrown away
            self.results.pop(key, None)
        try:
            return self.workers.start(executable, attempt)
        except Exception as error:
            if not isinstance(error, LaunchError):
                _LOG.exception("%s: `%s` did not start", self._plan.program, name)
            self.report(
                Exited(name=name, attempt=attempt, outcome="raised", error=error)
            )
            return None

    def _close(self, finish: states.Finish) -> None:
        assert self.workers is not None, "closed after it was opened"
        try:
            self.workers.close()
        except BaseException as error:
            _LOG.exception("%s: the launcher did not close", self._plan.program)
            if finish.failure is None:
                finish = states.Finish(failure=_broken(error), left=finish.left)
        # Not before the launcher was closed: readers take it for the end of the run.
        self.finish = finish
        self._on_event()


def _units(executables: Sequence[Executable]) -> list[states.Unit]:
    """Return what fails and starts again as one: a worker, or a group of processes."""
    units: dict[str, list[Executable]] = {}
    for each in executables:
        own = each.label if each.is_member else each.name
        units.setdefault(own, []).append(each)
    return [
        states.Unit(
            workers=tuple(each.name for each in members),
            restart=members[0].restart,
            called=f"all of `{label}`" if len(members) > 1 else "it",
        )
        for label, members in units.items()
    ]


def _result_names(executable: Executable) -> list[str]:
    """Return what a result is kept under; the group's is that of its first worker."""
    is_first = executable.is_member and executable.index == 0
    return [executable.name, *([executable.label] if is_first else [])]


def _is_going_well(state: states.State | None) -> bool:
    """Return whether a run only does what it was asked to do: stop."""
    return (
        state is not None
        and state.phase in ("stopping", "ended")
        and state.failure is None
        and not any(unit.kills for unit in state.units)
        and not state.asks
    )


def _broken(error: BaseException) -> states.Ended:
    """Return how a launcher ended that breaks its promises."""
    return ended(Exited(name=_LAUNCHER, attempt=0, outcome="raised", error=error))
