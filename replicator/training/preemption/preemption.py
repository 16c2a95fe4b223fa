"""Stop a run on a signal: saved, at one step in all processes, with an exit code.

SIGTERM (a preemption, a cluster that needs the machine), SIGHUP and the first Ctrl-C
only set a flag; the loop stops after a step, saves, and then `Preempted` is raised,
which ends the program with a documented code. It is a `SystemExit`, so every `finally`
of the user's runs, and `except Exception` does not swallow it.
"""

import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal, Self

import jax

from replicator.base.host.clock import Clock, SystemClock
from replicator.base.host.standard_streams import say_raw
from replicator.errors import ArgumentError
from replicator.hooks.protocol import Hook, StateEvent
from replicator.training.node import STOPPED, ProgramNode
from replicator.training.preemption.stop_agreement import StopAgreement, StopPoint
from replicator.training.run_spec import RunSpec

SIGNALS = ("SIGTERM", "SIGHUP", "SIGINT")
SAME_PRESS_S = 0.5
"""Ctrl-C often comes twice, from the terminal and from a launcher that passes it on."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedSignals:
    """Signals received so far.

    Attributes:
      signal: Name of the first; None if there was none.
      interrupts: Number of times that Ctrl-C was pressed.
      interrupted_at_s: Time of the last one.
    """

    signal: str | None = None
    interrupts: int = 0
    interrupted_at_s: float = 0.0


def decide(
    asked: ReceivedSignals, name: str, now_s: float
) -> tuple[ReceivedSignals, Literal["stop", "ignore", "interrupt"]]:
    """Decide what a signal leads to.

    >>> decide(ReceivedSignals(), "SIGTERM", 5.0)[1]
    'stop'

    Args:
      asked: Signals received before.
      name: Name of the signal.
      now_s: Time of the signal.

    Returns:
      The signals received now, and the action: `stop` after a step, `ignore` it, or
      `interrupt` the running code.
    """
    first = asked.signal is None
    if name == "SIGINT":
        again = asked.interrupts and now_s - asked.interrupted_at_s < SAME_PRESS_S
        asked = dataclasses.replace(
            asked,
            interrupts=asked.interrupts + (0 if again else 1),
            interrupted_at_s=asked.interrupted_at_s if again else now_s,
        )
        if asked.interrupts > 1 and not again:
            return asked, "interrupt"
    if not first:
        return asked, "ignore"
    return dataclasses.replace(asked, signal=name), "stop"


class Preemption(Hook):
    """Handles signals from `start`, or entering, until `close`: a hook of the loop.

    It stops the loop, which then ends as if all steps were made. `LeaveSaved`, in its
    place, saves the run and leaves the loop.

    Signals are handled in the main thread only, and only those that the program neither
    handles itself nor ignores (`nohup`). `close` restores the handlers; a signal taken
    by C++ code, as `jax.distributed` takes SIGTERM, gets the system's default.

    In a node of a program no signal is handled: the launcher handles them, and sets the
    node's stop event, which is checked after each step.

    Args:
      agreement: Agreement on the step where all processes stop.
      clock: Clock of the times of signals.
      node: Node that the run is in; None for none.

    Attributes:
      stop: Last step and cause, once the run stops.
      on_asked: Called in the handler of the first signal, in the main thread, with the
        signal's name, if there are no other processes.
    """

    def __init__(
        self,
        agreement: StopAgreement,
        *,
        clock: Clock | None = None,
        node: ProgramNode | None = None,
    ) -> None:
        self.stop: StopPoint | None = None
        self.on_asked: Callable[[str], None] | None = None
        self._agreement = agreement
        self._clock = clock or SystemClock()
        self._node = node
        self._asked = ReceivedSignals()
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()

    @property
    def should_stop(self) -> bool:
        """True at the step where all processes stop."""
        return self.stop is not None

    def start(self) -> Self:
        """Install the signal handlers."""
        self._agreement.start()
        # Only the main thread may install handlers.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._node is None:
            for name in SIGNALS:
                self._take(getattr(signal, name))
        return self

    def on_state(self, event: StateEvent) -> None:
        """Pass the end of a step."""
        if self.node_stops:
            self._agreement.want(STOPPED)
        self.stop = self._agreement.reached(event.step)

    def leaves_evaluation(self) -> bool:
        """Pass a block of an evaluation; return whether all processes leave it."""
        if self.node_stops:
            self._agreement.want(STOPPED)
        self.stop = self._agreement.reached_block()
        return self.should_stop

    @property
    def node_stops(self) -> bool:
        """True if the run is in a node whose stop event is set."""
        return self._node is not None and self._node.stop_event.is_set()

    def ends_input(self) -> bool:
        """Return whether to stop waiting for input: the node stops, and is alone."""
        return self.node_stops and self._agreement.alone

    def leave_if_asked(self, step: int, *, log: Callable[..., None]) -> None:
        """End the program if a signal arrived too late to stop its run, which is saved.

        Raises:
          Preempted: A signal arrived.
        """
        if self._asked.signal is None:
            return
        log("preempted", step=step, signal=self._asked.signal)
        StopPoint(signal=self._asked.signal, step=step).raise_saved()

    def close(self) -> None:
        """Restore the signal handlers; closing twice is fine."""
        self._agreement.close()
        while self._before:
            number, before = self._before.popitem()
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _take(self, number: int) -> None:
        before = signal.getsignal(number)
        if before is None:  # taken by C++: Python cannot restore it
            before = signal.SIG_DFL
        if before in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, self._handle)
            self._before[number] = before
        elif before != signal.SIG_IGN:
            _log.info("%s has a handler, which is left alone.", signal.Signals(number))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Run between any two bytecodes of the main thread: take no lock, print raw."""
        if os.getpid() != self._pid:
            # A forked child, such as an input worker, inherits this handler, and is
            # ended by its parent's signals: they must have their usual effect on it.
            signal.signal(number, self._before.get(number, signal.SIG_DFL))
            os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        self._asked, action = decide(self._asked, name, self._clock.now_s())
        if action == "interrupt":
            raise KeyboardInterrupt
        if action == "stop":
            self._agreement.want(name)
            hint = "; again to end at once" if name == "SIGINT" else ""
            say_raw(f"replicator: {name}: stops after this step, and saves{hint}\n")
            if self.on_asked is not None and self._agreement.alone:
                self.on_asked(name)


@dataclasses.dataclass(eq=False)
class LeaveSaved(Hook):
    """Save the run at the step where all processes stop, and leave: the last hook.

    A run in a node of a program returns to its caller, who may have more to do. In any
    other run the program ends.

    It leaves in the middle of the loop, not at its end: work of the end of a run (an
    evaluation, the last row of metrics) is left to the resumed run. A process that is
    alone and waits for its input can save its state, and leaves at once.

    Attributes:
      spec: The run; after its last step it simply ends.
      preemption: Handler of signals; not itself a hook of the same loop.
      saving: Hook that saves the whole run.
      first_step: Updates made before this opening.
      has_left: Whether the run is saved and makes no more steps.
    """

    phase = "save"

    spec: RunSpec
    preemption: Preemption
    saving: Hook
    _: dataclasses.KW_ONLY
    first_step: int

    def __post_init__(self) -> None:
        self._newest: StateEvent | None = None
        self.has_left = False
        self.preemption.on_asked = self.leave_if_waiting

    @property
    def should_stop(self) -> bool:
        """True once the run makes no more steps."""
        return self.has_left

    def on_state(self, event: StateEvent) -> None:
        """Leave, if this is the agreed step.

        Raises:
          Preempted: The run is saved, and the program ends.
          KeyboardInterrupt: Likewise, at an interactive prompt.
        """
        self._newest = event
        self.preemption.on_state(event)
        # After its last step the run ends, saved, anyway.
        if self.preemption.should_stop and event.goes_on():
            self.leave_saved()

    def close(self) -> None:
        """Stop reacting to signals."""
        self.preemption.on_asked = None
        self._newest = None

    def leave_if_waiting(self, signal_name: str) -> None:
        """Leave now, if the run waits for its input; as `on_state`."""
        # Runs in the signal handler, in the main thread: it saves here, and raises out
        # of the wait. The state is donated only once the batch is there. Input that was
        # read and not used is read again: the position is that of the last step. A
        # loop's own step may have donated the state: then it leaves after that step.
        if self.spec.phases.current.phase == "input" and self._is_state_there():
            self._leave(signal_name)

    def _is_state_there(self) -> bool:
        try:
            leaves = jax.tree.leaves(self._newest and self._newest.state)
        except ArgumentError:  # between a step and `after`: leave after that
            return False
        return not any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)

    def leave_saved(self) -> None:
        """Save the newest state, if any, and leave, as was asked for.

        Raises:
          Preempted: The program ends.
          KeyboardInterrupt: Likewise, at an interactive prompt.
        """
        assert self.preemption.stop is not None
        self._leave(self.preemption.stop.signal)

    def _leave(self, signal_name: str) -> None:
        step = self.first_step  # of the checkpoint that is there
        if self._newest is not None:
            step = self._newest.step
            self.spec.phases.enter(self.phase)
            self.saving.on_end(self._newest)  # returns when that is durable
        self.spec.log("preempted", step=step, signal=signal_name)
        self.has_left = True
        if signal_name != STOPPED:
            StopPoint(signal=signal_name, step=step).raise_saved()
