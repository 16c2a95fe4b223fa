"""Values of an island, and shards of them that come from other islands.

A process of an island may get the shards of one value from several processes of
another: each sends those that it holds. If a sender is lost, some processes may have
their shards and others never will, and then their collectives differ. So the processes
of an island vote on each value, once, and take it if all have their shards.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from replicator.controller.islands.protocol import Key, ShardReceiver
from replicator.controller.islands.waiting.outcome import Outcome, first_error


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
    """Shards that arrived, or will: one thread takes them, others bring them.

    Args:
      name: Name of the process that takes them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # By value, and the process that sends it by number, or votes on it by name.
        self._slots: dict[tuple[Key, int | str], Future[IslandValue]] = {}
        self._lost: dict[str, BaseException] = {}
        self._awaited: tuple[str, Future[IslandValue]] | None = None
        self._lock = threading.Lock()  # guards these three

    def deliver(self, key: Key, sender: int | str, shards: IslandValue) -> None:
        """Take shards of a value, or a vote of another process of this island."""
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

    def take(
        self,
        source: str,
        key: Key,
        senders: Sequence[int],
        fellows: Mapping[str, ShardReceiver],
    ) -> IslandValue:
        """Wait for the shards of a value; return them in the order of the devices.

        Args:
          source: Name of the island that sends.
          key: The value.
          senders: For each device, the number of the process that sends its shard.
          fellows: By name, the other processes of this island that take the value.
        """
        found = {
            sender: self._taken(source, (key, sender))
            for sender in dict.fromkeys(senders)
        }
        done = _all_done([each.done for each in found.values()])
        for fellow in fellows.values():
            fellow.deliver(key, self._name, IslandValue(None, done))
        votes = [self._taken(name, (key, name)).done for name in fellows]
        if first_error([done]) is None and (lost := first_error(votes)) is not None:
            return lost_value(lost)
        if any(each.array is None for each in found.values()):
            return IslandValue(None, done)
        shards = {sender: iter(each.array) for sender, each in found.items()}
        return IslandValue([next(shards[sender]) for sender in senders], done)

    def _taken(self, source: str, at: tuple[Key, int | str]) -> IslandValue:
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
