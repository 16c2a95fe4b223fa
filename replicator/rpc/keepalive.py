"""Keepalive: when a client pings, and how it reads the pong.

A ping names the calls that wait; the pong has for each whether it runs or waits, and
for how long. A call that was named and is not in the pong is unknown to a live server:
its message or its reply was lost. (The connection keeps the order: the call was
sent before the ping, and a reply that was sent would be here before the pong.)

No thread and no connection: `link` sends and receives.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_log = logging.getLogger(__name__)

MAX_CALLS = 256
"""Most calls that one ping may name: the oldest."""
_SILENT_AFTER = 5


class Ping(NamedTuple):
    """A ping to send.

    Attributes:
      number: Number that comes back with the pong.
      call_ids: Calls whose state is asked for.
    """

    number: int
    call_ids: list[int]


class Pong(NamedTuple):
    """The reply to a ping.

    Attributes:
      states: For each call that the server knows, "runs" or "waits", and seconds.
      unknown: Calls that the server does not know.
    """

    states: dict[int, tuple[str, float]]
    unknown: list[int]


class Keepalive:
    """Pings of one link, and how long its server has been silent."""

    def __init__(self, peer: str, *, heartbeat_s: float) -> None:
        """Start with no ping sent.

        Args:
          peer: Name of the server, for the log.
          heartbeat_s: Seconds between two pings; after five of them without any
            message the server counts as silent.
        """
        self._peer = peer
        self._heartbeat_s = heartbeat_s
        self._last = Ping(0, [])
        self._next_s = 0.0
        self._asked_s: float | None = None
        self._has_been_logged = False

    def hear(self) -> None:
        """Note that the server sent a message.

        >>> keepalive = Keepalive("the server", heartbeat_s=1.0)
        >>> _ = keepalive.ping(0.0, [7])
        >>> keepalive.silent_s(3.0)
        3.0
        >>> keepalive.hear()
        >>> keepalive.silent_s(3.0)
        0.0
        """
        self._asked_s = None

    def silent_s(self, now_s: float) -> float:
        """Return for how long pings have had no answer; 0 below two heartbeats."""
        if self._asked_s is None or now_s - self._asked_s < 2 * self._heartbeat_s:
            return 0.0
        return now_s - self._asked_s

    def is_due(self, now_s: float) -> bool:
        """Return whether it is time for a ping."""
        return now_s >= self._next_s

    def ping(self, now_s: float, call_ids: Sequence[int]) -> Ping:
        """Return the next ping, which is sent now; log a long silence, once."""
        self._next_s = now_s + self._heartbeat_s
        if self._asked_s is None:
            self._asked_s = now_s
            self._has_been_logged = False
        silent_s = now_s - self._asked_s
        if silent_s >= _SILENT_AFTER * self._heartbeat_s and not self._has_been_logged:
            self._has_been_logged = True
            _log.warning(
                "%s has given no sign of life for %.1f s; calls wait for it: %d",
                *(self._peer, silent_s, len(call_ids)),
            )
        self._last = Ping(self._last.number + 1, list(call_ids[:MAX_CALLS]))
        return self._last

    def pong(self, number: int, value: Iterable[tuple[int, str, float]]) -> Pong:
        """Read the answer to a ping.

        Args:
          number: Number of the ping; the reply to one before the last is ignored.
          value: Value of the reply, `checked`.

        >>> keepalive = Keepalive("the server", heartbeat_s=1.0)
        >>> ping = keepalive.ping(0.0, [7, 8])
        >>> keepalive.pong(ping.number, [(7, "runs", 0.5)])
        Pong(states={7: ('runs', 0.5)}, unknown=[8])
        """
        states = {call_id: (what, seconds) for call_id, what, seconds in value}
        if number != self._last.number:
            return Pong({}, [])
        unknown = [call_id for call_id in self._last.call_ids if call_id not in states]
        return Pong(states, unknown)
