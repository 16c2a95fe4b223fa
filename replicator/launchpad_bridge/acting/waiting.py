"""Call a node that may be restarted: wait for it, log that, and stop with the program.

A call without a reply raises one of three errors: the connection broke, the server
stopped, or the time was over, also where the method itself waited for too long (for
room in a table, for variables). Other errors are the method's own.
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
"""Seconds that the learner may hold a call for variables; a stop waits as long."""

UNANSWERED = (ConnectionLostError, ServerStoppedError, TimeoutError)
"""Errors of a call whose server is gone, or has no reply yet."""


class ProgramStoppedError(Exception):
    """The program stops, and so the wait ends."""


class Waiting:
    """Makes calls for one worker, again until they have a reply.

    Attributes:
      name: Name of the worker, for the log.
      stop: Set when the worker must stop.
      waits: Number of calls that had to be made again.
      waited_s: Seconds between first failures and replies.
    """

    def __init__(self, name: str, stop: threading.Event) -> None:
        self.name = name
        self.stop = stop
        self.waits = 0
        self.waited_s = 0.0

    @classmethod
    def of_node(cls, name: str | None, otherwise: str) -> Self:
        """Return an object for the node that runs here; outside of one it never stops.

        Args:
          name: Name of the worker; its own in a program by default.
          otherwise: Default name outside of a program.
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
        """Return the reply of a call, made as often as needed.

        Args:
          what: Name of the awaited thing, for the log.
          call: Makes the call; may be called again.
          again_after: Errors after which it is made again.

        Raises:
          ProgramStoppedError: The program stops.

        >>> waiting = Waiting("actor/0", threading.Event())
        >>> waiting.call("its table", lambda: 3)
        3
        """
        since_s: float | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                reply = call()
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
            return reply

    def newest_variables(self, learner: Any, newer_than: int | None) -> Any:
        """Return a learner's newest `Variables`; None if `newer_than` is the newest."""
        return self.call(
            "variables",
            lambda: learner.get_variables(
                newer_than=newer_than, timeout_s=HANDLER_WAIT_S
            ),
        )

    def lost(self, what: str, error: Exception) -> None:
        """Log the awaited thing, and the error.

        Raises:
          ProgramStoppedError: The program stops, which caused the error.
        """
        if self.stop.is_set():
            raise ProgramStoppedError from error
        self.waits += 1
        # As text: a log handler that keeps records would keep all objects in the
        # error's frames, variables on a device too.
        _LOG.warning("%s waits for %s: %s", self.name, what, str(error))

    def pause(self, seconds: float) -> None:
        """Wait a little.

        Raises:
          ProgramStoppedError: The program stops.
        """
        if self.stop.wait(seconds):
            raise ProgramStoppedError
