"""Call a node that may start again: wait for it, say so, and stop with the program.

A call that did not reach its end raises one of three errors: the connection broke, the
server stopped, or the time was over, also where it was the method that waited for too
long (for room in a table, for variables). Other errors are the method's own.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

from replicator.errors import ConnectionLostError, ServerStoppedError
from replicator.launchpad_bridge.running import node_context

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_Result = TypeVar("_Result")

HANDLER_WAIT_S = 1.0
"""How long the learner may keep a call for variables: who stops waits as long."""

UNANSWERED = (ConnectionLostError, ServerStoppedError, TimeoutError)
"""What a call raises whose server is gone, or has no answer yet."""


class ProgramStoppedError(Exception):
    """The program stops: what was waited for is not worth it any more."""


class Waiting:
    """Makes calls for one worker, again until they are answered.

    Attributes:
      name: Of the worker, for the log.
      stop: Set when it is to stop.
      waits: Times that a call had to be made again.
      waited_s: Seconds between first failures and answers.
    """

    def __init__(self, name: str, stop: threading.Event) -> None:
        self.name = name
        self.stop = stop
        self.waits = 0
        self.waited_s = 0.0

    @classmethod
    def of_node(cls, name: str | None, otherwise: str) -> Self:
        """Return what waits for the node that runs here; outside of one nothing stops.

        Args:
          name: Of the worker; its own in a program by default.
          otherwise: Its name outside of a program.
        """
        context = node_context.current()
        if context is None:
            return cls(name or otherwise, threading.Event())
        return cls(name or context.worker, context.stop_event)

    def call(
        self,
        what: str,
        call: Callable[[], _Result],
        *,
        again_after: tuple[type[Exception], ...] = UNANSWERED,
    ) -> _Result:
        """Return a call's answer, however often it has to be made.

        Args:
          what: For the log: what it is that is waited for.
          call: May be made again.
          again_after: Errors after which it is.

        Raises:
          ProgramStoppedError: The program stops.
        """
        since_s: float | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                answer = call()
            except again_after as error:
                if since_s is None:
                    since_s = time.monotonic()
                    self.lost(what, error)
                self.pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            if since_s is not None:
                waited_s = time.monotonic() - since_s
                self.waited_s += waited_s
                _LOG.warning(
                    "%s has waited %.1f s for %s and goes on", self.name, waited_s, what
                )
            return answer

    def newest_variables(self, learner: Any, newer_than: int | None) -> Any:
        """Return a learner's newest `Variables`; None where these are those known."""
        return self.call(
            "variables",
            lambda: learner.get_variables(
                newer_than=newer_than, timeout_s=HANDLER_WAIT_S
            ),
        )

    def lost(self, what: str, error: Exception) -> None:
        """Say what is waited for, and why.

        Raises:
          ProgramStoppedError: The program stops, which is why it failed.
        """
        if self.stop.is_set():
            raise ProgramStoppedError from error
        self.waits += 1
        # As a word: a handler that keeps records would keep all that the error's frames
        # hold, variables on a device too.
        _LOG.warning("%s waits for %s: %s", self.name, what, str(error))

    def pause(self, seconds: float) -> None:
        """Wait a little.

        Raises:
          ProgramStoppedError: The program stops.
        """
        if self.stop.wait(seconds):
            raise ProgramStoppedError
