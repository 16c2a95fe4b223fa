"""Values of an island, and shards of them that come from other islands.

A process of an island may get the shards of one value from several processes of
another: each sends those that it holds.
"""

import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from replicator.controller.islands.protocol import Key
from replicator.controller.islands.waiting.outcome import Outcome


@dataclasses.dataclass(frozen=True, slots=True)
class IslandValue:
    """An array, or the shards of one, that was dispatched.

    Attributes:
      array: None if nothing was.
      done: Ends when it is computed, with the error of the op that failed.
    """

    array: Any
    done: Outcome


def lost_value(error: BaseException) -> IslandValue:
    """Return a value that will never be computed."""
    return IslandValue(None, Outcome().end(error))


class ArrivedShards:
    """Shards that arrived, or will: one thread takes them, others bring them."""

    def __init__(self) -> None:
        self._slots: dict[tuple[Key, int], Future[IslandValue]] = {}
        self._lost: dict[str, BaseException] = {}
        self._awaited: tuple[str, Future[IslandValue]] | None = None
        self._lock = threading.Lock()  # guards these three

    def deliver(self, key: Key, sender: int, shards: IslandValue) -> None:
        """Take shards of a value that a process of another island sends."""
        with self._lock:
            slot = self._slots.setdefault((key, sender), Future())
            if not slot.done():
                slot.set_result(shards)

    def lose(self, source: str, error: BaseException) -> None:
        """Fail what has not arrived of an island that was lost."""
        with self._lock:
            self._lost[source] = error
            if self._awaited is not None and self._awaited[0] == source:
                self._fail_awaited(error)

    def take(self, source: str, key: Key, senders: Sequence[int]) -> IslandValue:
        """Wait for the shards of a value; return them in the order of the devices.

        Args:
          source: Name of the island that sends.
          key: The value.
          senders: For each device, the number of the process that sends its shard.
        """
        found = {
            sender: self._taken(source, (key, sender))
            for sender in dict.fromkeys(senders)
        }
        done = _all_done([each.done for each in found.values()])
        if any(each.array is None for each in found.values()):
            return IslandValue(None, done)
        shards = {sender: iter(each.array) for sender, each in found.items()}
        return IslandValue([next(shards[sender]) for sender in senders], done)

    def _taken(self, source: str, at: tuple[Key, int]) -> IslandValue:
        with self._lock:
            slot = self._slots.setdefault(at, Future())
            self._awaited = source, slot
            if source in self._lost:
                self._fail_awaited(self._lost[source])
        value = slot.result()
        with self._lock:
            del self._slots[at]
            self._awaited = None
        return value

    def _fail_awaited(self, error: BaseException) -> None:
        assert self._awaited is not None
        if not (slot := self._awaited[1]).done():
            slot.set_result(lost_value(error))


def _all_done(inputs: Sequence[Outcome]) -> Outcome:
    """Return what ends when all have ended; wait for them if there are several."""
    for each in inputs if len(inputs) > 1 else ():
        each.exception()
    failed = (each for each in inputs if each.done() and each.exception())
    return next(failed, inputs[0])
