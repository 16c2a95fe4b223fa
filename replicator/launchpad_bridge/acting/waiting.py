"""Call a node that may start again: wait for it, say so, and stop with the program.

A call that did not reach its end is answered by one of three errors: the connection
broke, no answer came in time, the server stopped. Others are the method's own.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from replicator.errors import (
    CallTimeoutError,
    ConnectionLostError,
    ServerStoppedError,
)

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_Result = TypeVar("_Result")

GONE = (ConnectionLostError, CallTimeoutError, ServerStoppedError)
"""What a call raises whose server is gone or does not answer."""


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

    def call(
        self,
        what: str,
        call: Callable[[], _Result],
        *,
        again_after: tuple[type[Exception], ...] = GONE,
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

    def lost(self, what: str, error: Exception) -> None:
        """Say what is waited for, and why.

        Raises:
          ProgramStoppedError: The program stops, which is why it failed.
        """
        if self.stop.is_set():
            raise ProgramStoppedError from error
        self.waits += 1
        _LOG.warning("%s waits for %s: %s", self.name, what, error)

    def pause(self, seconds: float) -> None:
        """Wait a little.

        Raises:
          ProgramStoppedError: The program stops.
        """
        if self.stop.wait(seconds):
            raise ProgramStoppedError
