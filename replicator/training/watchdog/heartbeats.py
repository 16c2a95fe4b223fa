"""Exchange heartbeats with the watchdogs of other processes, in a thread.

A request to a service whose host stands still never returns. So the watchdog reads the
last result of this thread, and never waits for it.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

from replicator.base.host.clock import Clock
from replicator.distributed.notices import Notices
from replicator.errors import DistributedError
from replicator.training.watchdog.peers import (
    Beat,
    Peer,
    Straggler,
    find_straggler,
    follow,
)

STRAGGLERS_EVERY_S = 60.0
_PROCESSES_PER_S = 50  # beats a second that the service takes easily
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PeerStatus:
    """Last known state of the other processes.

    Attributes:
      peers: The other processes; read only while `wants_peers` is set.
      hung: Statement of each process about a hang; None for those without one.
      left: True for each process that is about to exit.
    """

    peers: tuple[Peer, ...] = ()
    hung: tuple[Any, ...] = ()
    left: tuple[bool, ...] = ()


class Heartbeats:
    """Exchanges beats until it is closed.

    Args:
      notices: Notices of all processes.
      clock: Clock of all times.
      beat: Returns this process's next beat, from its number.
      every_s: Seconds between beats of a small group; larger ones beat less often.
      on_straggler: Called in process 0, at most once a minute.
    """

    def __init__(
        self,
        notices: Notices,
        *,
        clock: Clock,
        beat: Callable[[int], Beat],
        every_s: float,
        on_straggler: Callable[[Straggler], None],
    ) -> None:
        # `status` is written by `_run` and read by the watchdog; `wants_peers` the
        # other way round. Both are replaced whole: no lock.
        self.status = PeerStatus()
        self.wants_peers = False
        self._notices = notices
        self._clock = clock
        self._beat = beat
        self._every_s = max(every_s, notices.count / _PROCESSES_PER_S)
        self._on_straggler = on_straggler
        self._known: tuple[tuple[Beat | None, float], ...] = ()
        self._measured: tuple[float, list[Beat | None]] | None = None
        # The watchdog's thread adds notices, `_run` removes them: each by one operation
        # of the dict, which the interpreter makes whole. `_wake` is set after adding,
        # so that no notice is left waiting.
        self._to_publish: dict[str, Any] = {}
        self._wake, self._closed = threading.Event(), False
        # A daemon, as a request to a dead service may never return; ended by `close`.
        self._thread = threading.Thread(
            target=self._run, name="replicator-heartbeats", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; one in a request that does not return is left behind."""
        self._closed = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.0)

    def publish(self, name: str, value: Any) -> None:
        """Publish a notice as soon as possible; returns at once."""
        self._to_publish[name] = value
        self._wake.set()

    def hurry(self) -> None:
        """Beat at once, instead of at the next interval."""
        self._wake.set()

    def _run(self) -> None:
        count = 0
        while not self._closed:
            count += 1
            try:
                self._turn(count)
            except DistributedError as failure:
                # JAX ends the others then; this process still watches itself.
                _log.debug("No heartbeats: %s", failure)
            self._wake.wait(self._every_s)
            # Cleared before the turn that follows: it sees all notices added until
            # here, and later ones wake it again.
            self._wake.clear()

    def _turn(self, count: int) -> None:
        for name in list(self._to_publish):
            self._notices.publish(name, self._to_publish.pop(name))
        self._notices.publish("beat", dataclasses.asdict(self._beat(count)))
        now_s = self._clock.now_s()
        hung = tuple(self._notices.peek("hung"))
        left: tuple[bool, ...] = ()
        if any(statement is not None for statement in hung):
            left = tuple(map(bool, self._notices.peek("left")))
        measures = self._notices.process == 0 and self._is_time_to_measure(now_s)
        if self.wants_peers or measures:
            beats = [each and Beat(**each) for each in self._notices.peek("beat")]
            self._known = follow(self._known, beats, now_s)
            if measures:
                self._measure(beats, now_s)
        self.status = PeerStatus(peers=self._peers(now_s), hung=hung, left=left)

    def _peers(self, now_s: float) -> tuple[Peer, ...]:
        return tuple(
            Peer(process=process, beat=beat, silent_s=now_s - since_s)
            for process, (beat, since_s) in enumerate(self._known)
            if process != self._notices.process
        )

    def _is_time_to_measure(self, now_s: float) -> bool:
        return self._measured is None or (
            now_s - self._measured[0] >= STRAGGLERS_EVERY_S
        )

    def _measure(self, beats: list[Beat | None], now_s: float) -> None:
        if None in beats:  # not all have begun
            return
        if self._measured is not None:
            straggler = find_straggler(self._measured[1], beats)
            if straggler is not None:
                self._on_straggler(straggler)
        self._measured = (now_s, beats)
