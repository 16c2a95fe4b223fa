"""Profile some steps with JAX's profiler: chosen before the run, or while it runs.

`decide` chooses when a trace begins and ends; the hook does it. A trace holds whole
steps: it begins and ends when the devices are idle. The first call of a run, which
compiles, is in no trace.

View traces with XProf or TensorBoard's profile plugin, or open the `.trace.json.gz` in
Perfetto.
"""

import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import jax

from replicator.base.host.paths import checked_path
from replicator.errors import ArgumentError, check_count
from replicator.hooks.protocol import Hook, StateEvent, StepEvent
from replicator.monitoring.events import EventLog

DEFAULT_STEPS = 10
SIGNAL = signal.SIGUSR2
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProfileState:
    """Steps still to trace, and the open trace.

    Attributes:
      wanted: Steps chosen before the run; None if there are none left.
      until: Last step of the open trace; None if none is open.
    """

    wanted: range | None = None
    until: int | None = None


Action: TypeAlias = Literal["start", "stop"]


def decide(
    state: ProfileState, event: StepEvent, *, requested: int
) -> tuple[ProfileState, Action | None]:
    """Decide whether a trace begins or ends now.

    Steps requested while a trace is open make it longer. Steps requested too late are
    not traced.

    Args:
      state: Steps still to trace, and the open trace.
      event: A call of the step that was dispatched; the next one, of as many updates,
        was not.
      requested: Number of steps requested since the call before.

    Returns:
      The next state, and the action.
    """
    wanted, until = state.wanted, state.until or 0
    if requested:
        until = max(until, event.step + requested)
    if wanted is not None and event.step + event.advanced >= wanted.start:
        wanted, until = None, max(until, wanted.stop - 1)
    is_open, stays_open = state.until is not None, until > event.step
    after = ProfileState(wanted=wanted, until=until if stays_open else None)
    if is_open == stays_open:
        return after, None
    return after, "start" if stays_open else "stop"


def check_steps(name: str, steps: range) -> None:
    """Refuse steps that cannot be traced.

    >>> check_steps("profile", range(0, 5))
    Traceback (most recent call last):
    replicator.errors.ArgumentError: `profile` must be a range of steps from 1 on, ...

    Args:
      name: Name of the argument.
      steps: Value of the argument.

    Raises:
      ArgumentError: It is not a range, is empty, begins below 1 or leaves steps out.
    """
    is_range = isinstance(steps, range)
    if not (is_range and steps and steps.start >= 1 and steps.step == 1):
        raise ArgumentError(
            f"`{name}` must be a range of steps from 1 on, got {steps!r}. "
            "Write `range(100, 110)` for ten steps."
        )


class Profile(Hook):
    """Trace steps into a directory: those of `steps`, and more when asked.

    Request a trace by `request()` from any thread, or by the signal SIGUSR2 (`kill
    -USR2 <pid>`), which traces the next ten steps. The signal is only handled if it has
    no other handler, and if this is made in the main thread.

    Args:
      directory: Directory of traces, each in `from_step_<n>/`. Made if absent.
      steps: Steps to trace, for example `range(100, 110)`: the steps 100 to 109.
      events: Journal of the run; gets one `profiled` event for each trace.

    Raises:
      ArgumentError: `steps` is empty, begins below 1 or leaves steps out.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        steps: range | None = None,
        events: EventLog | None = None,
    ):
        if steps is not None:
            check_steps("steps", steps)
        self._directory = checked_path("directory", directory)
        self._events = events
        self._state = ProfileState(wanted=steps)
        # Written by any thread or by the signal handler, read and cleared by the loop's
        # thread. No lock, which a handler could not take: a request between the read
        # and the clear is lost.
        self._requested = 0
        self._trace: _Trace | None = None
        self._listens = _listen(self.request)

    def request(self, steps: int = DEFAULT_STEPS) -> None:
        """Trace the next steps; returns at once.

        Args:
          steps: Number of steps, from the next dispatch on.

        Raises:
          ArgumentError: `steps` is below 1.
        """
        check_count("steps", steps)
        self._requested = steps

    def on_state(self, event: StateEvent) -> None:
        """Begin or end a trace if it is time."""
        requested, self._requested = self._requested, 0
        self._state, action = decide(self._state, event, requested=requested)
        if self._trace is not None:
            self._trace.end_step()
        if action is not None:
            jax.block_until_ready(event.state)
        if action == "start":
            self._trace = _Trace.start(self._directory, event.step + 1)
        elif action == "stop":
            self._stop(event.step)
        if self._trace is not None:
            self._trace.begin_step(event.step + 1)

    def on_end(self, event: StateEvent) -> None:
        """End an open trace, with the last step in it."""
        jax.block_until_ready(event.state)
        self._stop(event.step)

    def close(self) -> None:
        """End an open trace, and restore the signal."""
        if self._listens:
            self._listens = False
            signal.signal(SIGNAL, signal.SIG_DFL)
        self._stop(None)

    def _stop(self, step: int | None) -> None:
        trace, self._trace = self._trace, None
        if trace is None or not trace.stop():
            return
        _log.info("profiled steps %d to %s: %s", trace.first_step, step, trace.place)
        if self._events is not None:
            self._events.write(
                "profiled",
                step=step,
                first_step=trace.first_step,
                directory=str(trace.place),
            )


class _Trace:
    """An open trace. Its failures are logged: training goes on."""

    def __init__(self, place: Path, first_step: int) -> None:
        self.place = place
        self.first_step = first_step
        self._marker: jax.profiler.StepTraceAnnotation | None = None

    @classmethod
    def start(cls, directory: Path, first_step: int) -> "_Trace | None":
        # A folder of its own: the profiler names files by the second, and would mix two
        # traces of one second.
        place = directory / f"from_step_{first_step}"
        try:
            place.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(place)
        except (OSError, RuntimeError) as failure:  # or somebody else has one open
            _log.warning("no profile from step %d on: %s", first_step, failure)
            return None
        return cls(place, first_step)

    def begin_step(self, step: int) -> None:
        """Mark everything from now on as part of `step` in the trace."""
        self._marker = jax.profiler.StepTraceAnnotation("step", step_num=step)
        self._marker.__enter__()

    def end_step(self) -> None:
        if self._marker is not None:
            self._marker.__exit__(None, None, None)
            self._marker = None

    def stop(self) -> bool:
        """Write the trace; return whether that succeeded."""
        self.end_step()
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as failure:
            _log.warning(
                "the profile from step %d on is lost: %s", self.first_step, failure
            )
            return False
        return True


def _listen(call: Callable[[], None]) -> bool:
    """Call `call` on the signal, if it has no handler; return whether it does."""
    if threading.current_thread() is not threading.main_thread():
        return False  # only the main thread may install handlers
    if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return False
    signal.signal(SIGNAL, lambda *_: call())
    return True
