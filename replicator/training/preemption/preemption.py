"""Stop a run because somebody asks: at one step in all processes, saved, with a code.

SIGTERM (a preemption, a cluster that needs the machine), SIGHUP and the first Ctrl-C
only leave a note; the loop stops after a step, saves, and then `Preempted` is raised,
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
from replicator.monitoring.phases import Phase
from replicator.training.node import STOPPED, Node
from replicator.training.preemption.stop_agreement import Stop, StopAgreement
from replicator.training.run_spec import RunSpec

SIGNALS = ("SIGTERM", "SIGHUP", "SIGINT")
SAME_PRESS_S = 0.5
"""Ctrl-C often comes twice, from the terminal and from a launcher that passes it on."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What signals have asked for so far.

    Attributes:
      signal: The name of the first; None if there was none.
      interrupts: How often Ctrl-C was pressed.
      interrupted_at_s: When last.
    """

    signal: str | None = None
    interrupts: int = 0
    interrupted_at_s: float = 0.0


def decide(
    asked: Asked, name: str, now_s: float
) -> tuple[Asked, Literal["stop", "ignore", "interrupt"]]:
    """Take in one signal.

    Args:
      asked: What came before.
      name: The signal's.
      now_s: When it came.

    Returns:
      What has been asked for now, and what to do: `stop` at the next occasion,
      `ignore` it, or `interrupt` whatever runs.
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
    """Hears signals from `start`, or entering, until `close`: a hook of the loop.

    It stops the loop, which then ends as if its steps were done. `LeaveSaved` in its
    place leaves the loop.

    Signals are heard in the main thread only, and only those that the program has no
    handler of its own for, and does not ignore (`nohup`). Afterwards they are what they
    were; one that C++ code had taken, as `jax.distributed` takes SIGTERM, is the
    system's again.

    In a node of a program no signal is heard: its launcher hears them, and sets the
    node's stop event, which is looked at after each step.

    Args:
      agreement: Where all processes stop.
      clock: Where times come from.
      node: The one that the run is in; None for none.

    Attributes:
      stop: Why and where the run stops, when it does.
      on_asked: Called in the handler of the first signal, in the main thread, with the
        signal's name, if nobody has to agree.
    """

    def __init__(
        self,
        agreement: StopAgreement,
        *,
        clock: Clock | None = None,
        node: Node | None = None,
    ) -> None:
        self.stop: Stop | None = None
        self.on_asked: Callable[[str], None] | None = None
        self._agreement = agreement
        self._clock = clock or SystemClock()
        self._node = node
        self._asked = Asked()
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()

    @property
    def should_stop(self) -> bool:
        """Whether this is the step where all processes stop."""
        return self.stop is not None

    def start(self) -> Self:
        """Begin to hear signals."""
        self._agreement.start()
        # Python lets no other thread install handlers.
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
        """Pass a block of an evaluation; tell whether all processes leave it there."""
        if self.node_stops:
            self._agreement.want(STOPPED)
        self.stop = self._agreement.reached_block()
        return self.should_stop

    @property
    def node_stops(self) -> bool:
        """Whether the run is in a node that is to stop."""
        return self._node is not None and self._node.stop_event.is_set()

    def ends_input(self) -> bool:
        """Tell whether to wait for input no more: the node stops, and is alone."""
        return self.node_stops and self._agreement.alone

    def leave_if_asked(self, step: int, *, tell: Callable[..., None]) -> None:
        """End the program if a signal came too late to stop its run, which is saved.

        Raises:
          Preempted: One came.
        """
        if self._asked.signal is None:
            return
        tell("preempted", step=step, signal=self._asked.signal)
        Stop(signal=self._asked.signal, step=step).raise_saved()

    def close(self) -> None:
        """Give the signals back; closing twice is fine."""
        self._agreement.close()
        while self._before:
            number, before = self._before.popitem()
            if signal.getsignal(number) == self._hear:
                signal.signal(number, before)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _take(self, number: int) -> None:
        before = signal.getsignal(number)
        if before is None:  # taken by C++: Python cannot give it back
            before = signal.SIG_DFL
        if before in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, self._hear)
            self._before[number] = before
        elif before != signal.SIG_IGN:
            _log.info("%s has a handler, which is left alone.", signal.Signals(number))

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Run between any two bytecodes of the main thread: take no lock, print raw."""
        if os.getpid() != self._pid:
            # A forked child, such as an input worker, has this handler, too, and is
            # ended by its parent: it must hear what it would have heard.
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


class LeaveSaved(Hook):
    """Save the run at the step where all processes stop, and leave: the last hook.

    A run in a node of a program ends by this, and returns: its caller may have more to
    do. Any other run's program ends.

    It leaves in the middle of the loop, not at its end: what is done once at the end of
    a run (an evaluation, the last row of metrics) is left to the run that goes on. A
    process that is alone and waits for its input has a state that it can save, and
    leaves at once.

    Args:
      spec: The run; where no step is to follow it simply ends.
      preemption: Hears the signals; no hook of the same loop.
      saving: What saves the whole run.
      first_step: Updates that the state has behind it.

    Attributes:
      saving: As it was given.
      has_left: Whether the run is saved, and to go no further.
    """

    phase: Phase = "save"

    def __init__(
        self,
        spec: RunSpec,
        preemption: Preemption,
        saving: Hook,
        *,
        first_step: int,
    ) -> None:
        self._spec = spec
        self._preemption = preemption
        self.saving = saving
        self._first_step = first_step
        self._newest: StateEvent | None = None
        self.has_left = False
        preemption.on_asked = self.leave_if_waiting

    @property
    def should_stop(self) -> bool:
        """Whether the run is to make no more steps."""
        return self.has_left

    def on_state(self, event: StateEvent) -> None:
        """Leave, if this is the step.

        Raises:
          Preempted: All is saved, and the program is to end.
          KeyboardInterrupt: Likewise, and a person waits at a prompt.
        """
        self._newest = event
        self._preemption.on_state(event)
        # Where no step is to follow the run ends, saved, by itself.
        if self._preemption.should_stop and event.goes_on():
            self.leave_asked()

    def close(self) -> None:
        """Leave no more."""
        self._preemption.on_asked = None
        self._newest = None

    def leave_if_waiting(self, signal_name: str) -> None:
        """Leave now, if the run waits for its input; as `on_state`."""
        # The state is not donated before the batch is there. What was read of the input
        # and not used is read again: the position is that of the last step.
        # This is in the signal handler: it saves here, and raises out of the wait.
        # A loop's own step may have taken the state over: then after that step.
        if self._spec.phases.current.phase == "input" and self._is_state_there():
            self._leave(signal_name)

    def _is_state_there(self) -> bool:
        try:
            leaves = jax.tree.leaves(self._newest and self._newest.state)
        except ArgumentError:  # a turn has begun a step: then after that turn
            return False
        return not any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)

    def leave_asked(self) -> None:
        """Save what has come since the run was opened, and leave, as was asked for.

        Raises:
          Preempted: The program is to end.
          KeyboardInterrupt: Likewise, and a person waits at a prompt.
        """
        assert self._preemption.stop is not None
        self._leave(self._preemption.stop.signal)

    def _leave(self, signal_name: str) -> None:
        step = self._first_step  # of what is saved already
        if self._newest is not None:
            step = self._newest.step
            self._spec.phases.enter(self.phase)
            self.saving.on_end(self._newest)  # returns when that is durable
        self._spec.tell("preempted", step=step, signal=signal_name)
        self.has_left = True
        if signal_name != STOPPED:
            Stop(signal=signal_name, step=step).raise_saved()
