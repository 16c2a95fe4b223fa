"""Agree on the step where all processes stop, once one of them is asked to.

No step waits for this agreement. A thread of each process polls the notices. When one
process wants to stop, each thread publishes the last step whose end its loop has
passed, and holds a lock so that the loop cannot pass another; the group stops at the
first step that none has passed. A loop inside its next step, waiting for the others'
part of it, blocks nothing: its thread answers for it.
"""

import contextlib
import dataclasses
import logging
import sys
import threading
from typing import Any

from replicator.base.host.clock import SystemClock
from replicator.distributed.notices import Notices
from replicator.errors import DistributedError, Preempted
from replicator.exit_codes import INTERRUPTED, PREEMPTED

_ANSWER_S = 60.0
_LOOK_S = 0.2
_PROCESSES_PER_S = 50  # requests a second that the service takes easily
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StopPoint:
    """Last step of a run that was asked to stop, and the cause.

    >>> StopPoint(signal="SIGTERM", step=7).exit_code
    75

    Attributes:
      signal: Name of the signal.
      step: The last step.
    """

    signal: str
    step: int

    @property
    def exit_code(self) -> int:
        """Exit code of the program."""
        return INTERRUPTED if self.signal == "SIGINT" else PREEMPTED

    def raise_saved(self) -> None:
        """End the program, now that everything is saved.

        Raises:
          Preempted: The program ends.
          KeyboardInterrupt: Ctrl-C at an interactive prompt: control returns to it.
        """
        text = f"{self.signal}: the run was saved after step {self.step}"
        if self.signal == "SIGINT" and hasattr(sys, "ps1"):
            raise KeyboardInterrupt(text)
        _log.warning("%s; code %d: start it again to go on.", text, self.exit_code)
        raise Preempted(self.exit_code, signal=self.signal, step=self.step)


class StopAgreement:
    """Agreement of all processes on the step where they stop.

    Args:
      notices: Notices of all processes.
      answer_s: Seconds to wait for the others' answers.
    """

    def __init__(self, notices: Notices, *, answer_s: float = _ANSWER_S) -> None:
        self._notices = notices
        self._passed = (0, 0)  # the step, and blocks evaluated since
        self._answer_s = answer_s
        # Guards `_passed`, `_agreed` and `_after`. The thread holds it while it agrees,
        # for up to `answer_s`, so that the loop cannot pass a step meanwhile. Signal
        # handlers never take it: one may interrupt the loop while it holds the lock.
        self._agreeing = threading.Lock()
        self._agreed: str | None = None  # the signal
        self._after = self._passed  # all stop at the first place behind this
        self._wanted: str | None = None  # one assignment: signal handlers write it
        self._published = False  # read and written by the thread alone
        self._closed = threading.Event()
        self._look_s = max(_LOOK_S, notices.count / _PROCESSES_PER_S)
        # A daemon, as a request to a dead service may never return; ended by `close`.
        self._thread = threading.Thread(
            target=self._run, name="replicator-preemption", daemon=True
        )

    def start(self) -> None:
        """Begin to poll the notices, if there are other processes."""
        if not self.alone:
            self._thread.start()

    def close(self) -> None:
        """Stop polling: the run is over, and its last step is the answer to others."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.0)

    @property
    def alone(self) -> bool:
        """True if there are no other processes."""
        return self._notices.count == 1

    def want(self, signal_name: str) -> None:
        """Ask all processes to stop; takes no lock, so that a handler may call it."""
        self._wanted = self._wanted or signal_name

    def reached(self, step: int) -> StopPoint | None:
        """Pass the end of `step`; return the stop if all processes stop there."""
        return self._pass((step, 0))

    def reached_block(self) -> StopPoint | None:
        """Pass a block of an evaluation; their number is the same in all processes."""
        step, blocks = self._passed
        return self._pass((step, blocks + 1))

    def _pass(self, place: tuple[int, int]) -> StopPoint | None:
        with self._agreeing:
            self._passed = place
            signal = self._wanted if self.alone else self._agreed
            if signal is None or place <= self._after:
                return None
            return StopPoint(signal=signal, step=place[0])

    def _run(self) -> None:
        while not self._closed.wait(self._look_s):
            try:
                if self._is_asked():
                    self._agree()
                    return
            except DistributedError as failure:
                _log.debug("No answer from the other processes: %s", failure)
        # Those that are asked from now on, in their last step, must not wait for this
        # process. (Here and not in `close`: a dead service may never answer.)
        with contextlib.suppress(DistributedError):
            self._notices.publish("passed", [self._passed, self._wanted])

    def _is_asked(self) -> bool:
        if self._wanted is not None and not self._published:
            self._notices.publish("stop", self._wanted)
            self._published = True
        return any(self._notices.peek("stop"))

    def _agree(self) -> None:
        with self._agreeing:
            # Under the lock, so that it stays true while this waits for the others.
            self._notices.publish("passed", [self._passed, self._wanted])
            answers = [answer for answer in self._wait_for_answers() if answer]
            self._after = max([self._passed, *(tuple(passed) for passed, _ in answers)])
            signals = [signal for _, signal in answers if signal]
            self._agreed = (signals or [self._wanted or "SIGTERM"])[0]

    def _answers(self) -> list[Any]:
        """Return the answers so far; none if the service cannot be reached."""
        # An error here would release the loop after others got this process's answer.
        try:
            return self._notices.peek("passed")
        except DistributedError:
            return [None] * self._notices.count

    def _wait_for_answers(self) -> list[Any]:
        clock, answers = SystemClock(), self._answers()
        deadline_s = clock.now_s() + self._answer_s
        while None in answers and clock.now_s() < deadline_s:
            if self._closed.wait(self._look_s / 4):
                break
            answers = self._answers()
        missing = [process for process, each in enumerate(answers) if each is None]
        if missing and not self._closed.is_set():
            _log.error(
                "Processes %s did not report their step within %g s: stopping "
                "without them.",
                missing,
                self._answer_s,
            )
        return answers
