"""Agree over the board on the step where all processes stop, once one is asked to.

With several processes nobody waits in any step. A thread of each looks at the board of
notices. When somebody wants to stop, the thread of each process pins the last step
whose end its loop has passed, while the loop may not pass another, and the group stops
at the first step that none has passed. A loop that is inside its next step, waiting for
the others' part of it, is not in the way: its thread answers for it.
"""

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
_PROCESSES_PER_S = 50  # so many requests a second the service takes easily
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Why and where a run stopped.

    Attributes:
      signal: What asked for it.
      step: The last one.
    """

    signal: str
    step: int

    @property
    def exit_code(self) -> int:
        """What the program ends with."""
        return INTERRUPTED if self.signal == "SIGINT" else PREEMPTED

    def raise_saved(self) -> None:
        """End the program, now that everything is saved.

        Raises:
          Preempted: The program is asked to end.
          KeyboardInterrupt: A person at a prompt pressed Ctrl-C, and wants it back.
        """
        text = f"{self.signal}: the run was saved after step {self.step}"
        if self.signal == "SIGINT" and hasattr(sys, "ps1"):
            raise KeyboardInterrupt(text)
        _log.warning("%s; code %d: start it again to go on.", text, self.exit_code)
        raise Preempted(self.exit_code, signal=self.signal, step=self.step)


class StopAgreement:
    """At which step all processes stop, once one of them wants to.

    Args:
      notices: The board of all processes.
      answer_s: How long the others are waited for.
    """

    def __init__(self, notices: Notices, *, answer_s: float = _ANSWER_S) -> None:
        self._notices = notices
        self._passed = (0, 0)  # the step, and blocks evaluated since
        self._answer_s = answer_s
        # Held by the thread while it agrees: the loop may not pass a step then.
        # For up to `answer_s`. Of `_passed` and `_agreed`; no signal handler takes it.
        self._agreeing = threading.Lock()
        self._agreed: str | None = None  # the signal
        self._after = self._passed  # all stop at the first place behind this
        self._wanted: str | None = None  # one assignment: signal handlers write it
        self._published = False  # read and written by the thread alone
        self._closed = threading.Event()
        self._look_s = max(_LOOK_S, notices.count / _PROCESSES_PER_S)
        self._thread = threading.Thread(
            target=self._run, name="replicator-preemption", daemon=True
        )

    def start(self) -> None:
        """Begin to look at the board; a process that is alone has nobody to ask."""
        if not self.alone:
            self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.0)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self._notices.count == 1

    def want(self, signal_name: str) -> None:
        """Ask all processes to stop; takes no lock, so that a handler may call it."""
        self._wanted = self._wanted or signal_name

    def reached(self, step: int) -> Stop | None:
        """Pass the end of `step`; tell whether it is the one where all stop."""
        return self._pass((step, 0))

    def reached_block(self) -> Stop | None:
        """Pass a block of an evaluation, which has as many in all processes."""
        step, blocks = self._passed
        return self._pass((step, blocks + 1))

    def _pass(self, place: tuple[int, int]) -> Stop | None:
        with self._agreeing:
            self._passed = place
            signal = self._wanted if self.alone else self._agreed
            if signal is None or place <= self._after:
                return None
            return Stop(signal=signal, step=place[0])

    def _run(self) -> None:
        while not self._closed.wait(self._look_s):
            try:
                if self._is_asked():
                    self._agree()
                    return
            except DistributedError as failure:
                _log.debug("No word from the other processes: %s", failure)

    def _is_asked(self) -> bool:
        if self._wanted is not None and not self._published:
            self._notices.publish("stop", self._wanted)
            self._published = True
        return any(self._notices.peek("stop"))

    def _agree(self) -> None:
        with self._agreeing:
            # Under the lock, so that it stays true while this waits for the others.
            self._notices.publish("passed", [self._passed, self._wanted])
            said = [answer for answer in self._wait_for_answers() if answer]
            self._after = max([self._passed, *(tuple(passed) for passed, _ in said)])
            signals = [signal for _, signal in said if signal]
            self._agreed = (signals or [self._wanted or "SIGTERM"])[0]

    def _answers(self) -> list[Any]:
        """Look what the others said; a look that fails saw nothing."""
        # Raised, it would let the loop pass steps after others were told of the last.
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
        missing = [process for process, said in enumerate(answers) if said is None]
        if missing and not self._closed.is_set():
            _log.error(
                "Processes %s did not say within %g s where they are: stopping "
                "without them.",
                missing,
                self._answer_s,
            )
        return answers
