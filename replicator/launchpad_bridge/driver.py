"""The thread that drives a run: events in, decisions of the supervisor performed.

It alone touches the supervisor's state, and opens, starts, stops and closes what the
launcher made; so a launcher needs no locks. It is no daemon: it ends with the run.
"""

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import final

from replicator.base.types import PyTree
from replicator.distributed.processes import states
from replicator.distributed.processes.supervisor import (
    begin,
    decide,
    next_deadline_s,
)
from replicator.errors import LaunchError
from replicator.launchpad_bridge.planning import addresses_of
from replicator.launchpad_bridge.protocols import (
    Executable,
    Exited,
    Launcher,
    Plan,
    Worker,
    Workers,
)
from replicator.launchpad_bridge.running.ends import ended, fallen

_LOG = logging.getLogger("replicator.launchpad_bridge")
_LAUNCHER = "the launcher"


@final
class Driver:
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
        patience: states.Patience,
        tell: Callable[[], None],
    ) -> None:
        """Make ready; nothing starts before `open`.

        Args:
          plan: What to run.
          launcher: Where.
          patience: How long to wait for what.
          tell: Called after each event, in the driver's thread.
        """
        self.state: states.State | None = None
        self.results: dict[str, PyTree] = {}
        self.finish: states.Finish | None = None
        self._plan = plan
        self._launcher = launcher
        self._patience = patience
        self._tell = tell
        # From the launcher's threads, `stop` and signal handlers (`put` is re-entrant)
        # to the driver's thread alone. What comes after the end is never taken.
        self._events: queue.SimpleQueue[Exited | states.StopAsked] = queue.SimpleQueue()
        self.workers: Workers | None = None
        self._running: dict[str, Worker] = {}
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

    def report(self, event: Exited | states.StopAsked) -> None:
        """Take an event; may be called from any thread, and in a signal handler."""
        self._events.put(event)

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
            finish = self._run()
        except BaseException as error:  # a launcher that breaks its promises
            _LOG.exception("%s: the run broke down", self._plan.program)
            finish = states.Finish(failure=_broken(error))
        self._close(finish)

    def _run(self) -> states.Finish:
        units = _units(self._plan.executables)
        state, actions = begin(units, time.monotonic(), patience=self._patience)
        while True:
            # Other threads read this one or the one before, whole: no lock.
            self.state = state
            finish = self._perform(state, actions)
            if finish is not None:
                failure = finish.failure or fallen(state)
                return dataclasses.replace(finish, failure=failure)
            self._note_ended()
            self._tell()
            event = self._next_event(state)
            if isinstance(event, Exited):
                if event.outcome not in ("raised", "died"):
                    # Before the state tells of the end: who waits for it reads this.
                    self._keep_result(event)
                executable = self._executables.get(event.name)
                is_member = executable is not None and executable.is_member
                event = ended(
                    event,
                    is_member=is_member,
                    is_stopping=state.phase != "running",
                    is_needed=not self.goals_have_ended,
                    stop_grace_s=self._patience.stop_grace_s,
                )
            state, actions = decide(state, event, time.monotonic())

    def _has_ended(self, name: str) -> bool:
        state = self.state
        return state is not None and state.worker(name).phase == "ended"

    def _note_ended(self) -> None:
        """Let clients in this process wait for no server that does not come again."""
        for name in [name for name in self._serving if self._has_ended(name)]:
            self._serving.remove(name)
            node = getattr(self._executables[name].run, "node", None)
            for address in addresses_of(node):
                address.builder.note_ended()

    def _keep_result(self, exited: Exited) -> None:
        executable = self._executables.get(exited.name)
        if executable is not None:
            self.results |= dict.fromkeys(_result_names(executable), exited.result)

    def _next_event(
        self, state: states.State
    ) -> Exited | states.StopAsked | states.TimeUp:
        due_s = next_deadline_s(state)
        if due_s is None:
            return self._events.get()
        # What has happened comes first: this process may have been suspended meanwhile.
        left_s = max(0.0, due_s - time.monotonic())
        try:
            return self._events.get(timeout=min(left_s, threading.TIMEOUT_MAX))
        except queue.Empty:
            return states.TimeUp()

    def _perform(
        self, state: states.State, actions: list[states.Action]
    ) -> states.Finish | None:
        # One line for what one event led to.
        said = "; ".join(a.message for a in actions if isinstance(a, states.Say))
        if said:
            level = logging.INFO if _is_going_well(state) else logging.WARNING
            _LOG.log(level, "%s: %s", self._plan.program, said)
        for action in actions:
            match action:
                case states.Start():
                    for name in action.names:
                        self._start(name, action.attempt)
                case states.Stop():
                    for name in action.names:
                        self._try("stop", name)
                case states.Kill():
                    for name in action.names:
                        self._try("kill", name)
                case states.Finish():
                    return action
        return None

    def _start(self, name: str, attempt: int) -> None:
        assert self.workers is not None, "opened before the first start"
        executable = self._executables[name]
        for key in _result_names(executable):  # of an attempt that is thrown away
            self.results.pop(key, None)
        try:
            self._running[name] = self.workers.start(executable, attempt)
        except Exception as error:
            self._running.pop(name, None)
            if not isinstance(error, LaunchError):
                _LOG.exception("%s: `%s` did not start", self._plan.program, name)
            self.report(
                Exited(name=name, attempt=attempt, outcome="raised", error=error)
            )

    def _try(self, what: str, name: str) -> None:
        worker = self._running.get(name)
        try:
            if worker is not None:
                getattr(worker, what)()
        except Exception:
            _LOG.exception("%s: could not %s `%s`", self._plan.program, what, name)

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
        self._tell()


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


def _is_going_well(state: states.State) -> bool:
    """Return whether a run only does what it was asked to do: stop."""
    return (
        state.phase in ("stopping", "ended")
        and state.failure is None
        and not any(unit.kills for unit in state.units)
        and not state.asks
    )


def _broken(error: BaseException) -> states.Ended:
    """Return how a launcher ended that breaks its promises."""
    return ended(Exited(name=_LAUNCHER, attempt=0, outcome="raised", error=error))
