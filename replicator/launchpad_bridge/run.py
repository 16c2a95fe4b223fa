"""`Run`: a running program, to wait for, stop and inspect.

    launcher's workers ── Exited, StopAsked ──> queue ──> driver thread ──> supervisor
    stop(), signals ─────── StopAsked ────────────^           │                decides
                                                              └── start, stop, kill

Any thread may wait for it. A failure that no wait has raised ends the script with a
status that is not 0 (`exit_status`); a signal stops the run (`interrupts`).
"""

import signal
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from replicator.base.types import PyTree
from replicator.distributed.processes import states
from replicator.errors import LaunchError, NodeFailedError, RunTimeoutError
from replicator.launchpad_bridge.driver import RunDriver
from replicator.launchpad_bridge.protocols import Launcher, Plan
from replicator.launchpad_bridge.running import exit_status, interrupts, node_context
from replicator.launchpad_bridge.running.exit_mapping import is_symptom
from replicator.launchpad_bridge.running.node_run import edge_of
from replicator.launchpad_bridge.running.results import Results
from replicator.launchpad_bridge.running.stopping import call_process_handlers
from replicator.launchpad_bridge.view.watching.journal import RunJournal

_TEST_PATIENCE_S = 1.0
"""A test that waits for its run within this time gets the failure there."""


class Run:
    """A program that runs. As a context manager it is stopped at the end of the block.

    >>> node = program.add_node(lp.PyNode(sum, [1, 2]), label="adder")
    >>> with lp.launch(program, launch_type="threads") as run:
    ...     run.wait(labels=["adder"])
    >>> run.results["adder"]
    3
    """

    def __init__(
        self,
        plan: Plan,
        launcher: Launcher,
        *,
        timeouts: states.Timeouts,
        close: Callable[[bool], None],
        test_frame: FrameType | None = None,
    ) -> None:
        """Make ready; `start` starts it.

        Args:
          plan: Workers to run.
          launcher: Launcher that starts them.
          timeouts: Timeouts of the supervisor.
          close: Called once the run is over, in the driver's thread, with True if all
            ended well.
          test_frame: Frame of the test in the main thread in which a failure is raised.
        """
        self._plan = plan
        self._close = close
        self._test_frame = test_frame
        self._in_test: threading.Timer | None = None
        self._is_seen = False
        # Guards nothing: conditions become true first, then this is notified. A signal
        # handler may run inside it, and only puts into the driver's queue.
        self._changed = threading.Condition()
        # Set once, by the driver's thread; `start` sets the first if that did not open.
        self._over = threading.Event()
        self._stopping = threading.Event()
        self._signum: int | None = None
        self._journal = RunJournal(plan.folder)
        self._driver = RunDriver(plan, launcher, timeouts=timeouts, on_event=self._note)

    def start(self) -> Self:
        """Open the launcher, start the workers.

        Raises:
          LaunchError: The launcher cannot be opened; nothing is left of the run.
        """
        # Before a worker runs: exits and signals must find the run.
        exit_status.keep_alive(self)
        interrupts.watch()
        # A signal that comes while this waits leaves a run that stops by itself.
        error = self._driver.open()
        if error is not None:
            self._leave(is_well=False)
            self._over.set()
            raise error
        return self

    @property
    def program(self) -> str:
        """Return the program's name."""
        return self._plan.program

    @property
    def run_id(self) -> str:
        """Return the unique id of this run."""
        return self._plan.run_id

    @property
    def plan(self) -> Plan:
        """Return the plan: its workers, its folder and its logs."""
        return self._plan

    @property
    def is_over(self) -> bool:
        """Return whether all workers have ended."""
        return self._over.is_set()

    @property
    def results(self) -> Mapping[str, PyTree]:
        """Return the results of nodes so far, by worker: "learner", "actors/3".

        Looking up one that could not be sent raises `EncodeError`.
        """
        return Results(self._driver.results)

    def results_of(self, label: str) -> list[PyTree]:
        """Return the result of each node of one group, in the order of their numbers.

        Args:
          label: Label of a group of one node or many.

        Returns:
          One value per worker; None for one that still runs.

        Raises:
          LaunchError: The label does not exist.
        """
        results = self.results
        return [results.get(name) for name in self._wanted([label])]

    @property
    def workers(self) -> dict[str, states.WorkerState]:
        """Return the state of each worker: its phase, its attempt, its last end."""
        state = self._driver.state
        return {} if state is None else {n: state.worker(n) for n in state.unit_of}

    @property
    def made_by_launcher(self) -> Any:
        """Return the `Workers` that the launcher made for this run."""
        return self._driver.workers

    @property
    def failure(self) -> NodeFailedError | None:
        """Return the error of a run that failed; None for others."""
        finish = self._driver.finish
        if finish is None or finish.failure is None:
            return None
        exit_status.seen(self.run_id)
        self._is_seen = True
        if self._in_test is not None:
            self._in_test.cancel()
        return self._failure(finish.failure)

    def stop(self) -> None:
        """Ask all nodes to stop; returns at once, and may be called again, anywhere."""
        self._driver.report(states.StopAsked(by="the launcher"))

    def wait(
        self,
        timeout_s: float | None = None,
        *,
        labels: Collection[str] | None = None,
        raise_error: bool = True,
        return_on_first_completed: bool = False,
    ) -> None:
        """Wait until all nodes have ended, or all learners: then stop the others.

        Args:
          timeout_s: Longest wait in seconds; None for no limit.
          labels: Wait for these groups only.
          raise_error: Whether to raise where a node failed.
          return_on_first_completed: Return when the first of them has ended.

        Raises:
          NodeFailedError: A node failed; names it, and is raised from its error.
          RunTimeoutError: They have not ended in time; names those that run.
          KeyboardInterrupt: Ctrl-C stopped the run, and this is the main thread.
          LaunchError: A node waits for its own run, or a label does not exist.
        """
        wanted = self._wanted(labels)
        self._refuse_inside()
        with interrupts.waiting(), self._changed:
            ended = self._changed.wait_for(
                self._is_over_or_stopped
                if labels is None and not return_on_first_completed
                else lambda: self._is_done(wanted, return_on_first_completed),
                timeout_s,
            )
        if not ended:
            running = ", ".join(name for name in wanted if self._runs(name))
            raise RunTimeoutError(
                f"`{self.program}` must end within {timeout_s:g} s, got {running} "
                "still running. Give it longer, or `run.stop()`."
            )
        self._raise_signal()
        failure = self.failure  # with `raise_error=False` it counts as seen, too
        if raise_error and failure is not None:
            raise failure from failure.__cause__

    def join(self) -> None:
        """Wait until all nodes have ended; raise where one failed."""
        self.wait()

    def stop_and_wait(self) -> None:
        """Ask all nodes to stop, and wait until they have."""
        self.stop()
        self.wait_end()
        self._raise_signal()

    def stop_event(self) -> threading.Event:
        """Return the event that is set once the run is asked to stop."""
        return self._stopping

    def wait_for_stop(self, timeout_secs: float | None = None) -> bool:
        """Wait until the run is asked to stop; return whether it was."""
        return self._stopping.wait(timeout_secs)

    def cleanup_after_test(self, test_case: Any = None) -> None:
        """Stop what still runs; raise where a node failed: `addCleanup` of a test.

        A failure that was raised in the test already is not raised again.
        """
        self.stop()
        self.wait(raise_error=not self._is_seen)

    def interrupt(self, signum: int) -> None:
        """Note a signal and ask the run to stop; called in a signal handler."""
        self._signum = self._signum or signum
        self._driver.report(states.StopAsked(by="signal"))

    def wait_end(self) -> None:
        """Wait until it is over, whatever its outcome."""
        self._refuse_inside()
        with interrupts.waiting():
            self._driver.join()

    def signal_status(self) -> int:
        """Return the exit status for the signal that ended it; 0 for none."""
        return 128 + self._signum if self._signum else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if error is None:
            self.wait()
            return
        self.wait(raise_error=False)
        failure = self.failure
        if failure is not None and is_symptom(error):
            raise failure from failure.__cause__
        if failure is not None and failure is not error:
            error.add_note(f"Besides, a node failed: {failure}")

    def __repr__(self) -> str:
        state = self._driver.state
        phase = "starting" if state is None else state.phase
        return f"<Run of {self.program!r}: {phase}>"

    def _note(self) -> None:
        """Note the changes of an event; in the driver's thread."""
        state, finish = self._driver.state, self._driver.finish
        self._journal.note(state, finish)
        if (
            state is not None
            and state.phase != "running"
            and not self._stopping.is_set()
        ):
            self._stopping.set()
            call_process_handlers()
        if finish is not None:
            self._end(finish)
        with self._changed:
            self._changed.notify_all()

    def _end(self, finish: states.Finish) -> None:
        if finish.failure is not None:
            exit_status.note_failure(self.run_id, self._failure(finish.failure))
        # After the note: an exit that finds this run gone must find its failure.
        self._leave(is_well=finish.failure is None and not finish.left)
        # Only now: a waiter may launch the program again at once.
        self._over.set()
        if finish.failure is not None and self._test_frame is not None:
            self._in_test = threading.Timer(
                _TEST_PATIENCE_S, interrupts.raise_in_main, (self._failure_in_test,)
            )
            self._in_test.daemon = True
            self._in_test.start()

    def _leave(self, *, is_well: bool) -> None:
        self._close(is_well)
        node_context.forget_run(self.run_id)
        exit_status.let_go(self)
        interrupts.tidy()

    def _failure_in_test(self, frame: FrameType | None) -> BaseException | None:
        """Return the failure if the test that launched this still runs."""
        test_frame, self._test_frame = self._test_frame, None
        while frame is not None and not self._is_seen:
            if frame is test_frame:
                return self.failure
            frame = frame.f_back
        return None

    def _failure(self, ended: states.Ended) -> NodeFailedError:
        """Return a new error, raised from the node's own."""
        error: BaseException | None = ended.exited.error
        is_described = isinstance(error, NodeFailedError)
        lines = [str(error) if is_described else ended.text]
        if error is not None and (edge := edge_of(error)):
            lines.append(edge)
        # Launchpad's own sentence: programs look for it.
        if retries := self._retries_of(ended.name):
            lines.append(f"num_retries_on_failure (={retries}) is reached.")
        lines.append(
            f"One of the workers exited. It is a node of the program {self.program!r}."
        )
        failure = NodeFailedError("\n".join(lines), node=ended.name)
        failure.__cause__ = error.__cause__ if is_described else error
        return failure

    def _retries_of(self, name: str) -> int:
        """Return the restarts of a worker that failed after the last one; else 0."""
        state = self._driver.state
        for each in self._plan.executables:
            if each.name == name and state is not None:
                return each.retries if state.worker(name).attempt >= each.retries else 0
        return 0

    def _wanted(self, labels: Collection[str] | None) -> list[str]:
        """Return the workers of these groups."""
        by_label: dict[str, list[str]] = {}
        for executable in self._plan.executables:
            by_label.setdefault(executable.label, []).append(executable.name)
        labels = list(by_label) if labels is None else labels
        unknown = [label for label in labels if label not in by_label]
        if unknown or isinstance(labels, str):
            raise LaunchError(
                f"`labels` must be a list of groups ({', '.join(by_label)}), got "
                f"{labels!r}. Use labels of {self.program!r}."
            )
        return [name for label in labels for name in by_label[label]]

    def _is_over_or_stopped(self) -> bool:
        if self._driver.goals_have_ended and not self._stopping.is_set():
            self.stop()
        return self._over.is_set()

    def _is_done(self, wanted: Sequence[str], first: bool) -> bool:
        if self._over.is_set():
            return True
        state = self._driver.state
        # The wait for a run that fails goes on to its end, which comes soon.
        if state is None or state.failure is not None:
            return False
        ended = [not self._runs(name) for name in wanted]
        return any(ended) if first else all(ended)

    def _runs(self, name: str) -> bool:
        state = self._driver.state
        return state is None or state.worker(name).phase != "ended"

    def _refuse_inside(self) -> None:
        context = node_context.of_thread()
        if context is not None and context.run_id == self.run_id:
            raise LaunchError(
                f"`run.wait` must be called outside of the run, got a call in its node "
                f"{context.worker!r}, which would wait for itself. Use "
                "`lp.wait_for_stop()`."
            )

    def _raise_signal(self) -> None:
        """Raise the error of a signal, in the main thread and once."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._signum is None or not is_main or not self.is_over:
            return
        signum, self._signum = self._signum, None
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signum)
