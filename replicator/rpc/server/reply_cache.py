"""Which calls a server has seen before: a call sent twice runs once.

    NEW ──begin──▶ running ──end──▶ answered ──too many, too large──▶ forgotten
                     │ begin again: joins     │ begin again: the same answer

Only calls of idempotent methods are kept, by client and call. The cache is bounded in
answers and in their bytes, oldest first; one that was forgotten runs again, which is
what `idempotent` allows. No lock and no clock: the server holds one around it.

A client misses an answer after a heartbeat (1 s) and asks again within another: as long
must it stay, whatever other clients are answered meanwhile. 20,000 calls a second times
three; small answers then take 22 MiB in all.
"""

import collections
from typing import Any, Generic, NamedTuple, TypeVar, final

from replicator.rpc.answers import Answer
from replicator.rpc.codec.encoded_once import EncodedOnce

_Asker = TypeVar("_Asker")
Key = tuple[bytes, int]
"""The client, and the number it gave the call."""


class Running(NamedTuple):
    """An earlier try of the same call waits or runs; the asker will be told as well."""

    first: Any


class New(NamedTuple):
    """Nobody asked before: run it, then `end` it."""


@final
class ReplyCache(Generic[_Asker]):
    """Calls that run, each with those who asked again, and answers that were given."""

    def __init__(self, *, max_answers: int = 65_536, max_bytes: int = 64 << 20) -> None:
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._running: dict[Key, list[_Asker]] = {}
        self._answers: collections.OrderedDict[Key, tuple[Answer, int]] = (
            collections.OrderedDict()
        )

    def begin(self, key: Key, asker: _Asker) -> New | Running | Answer:
        """Say what to do with a call that arrived."""
        kept = self._answers.get(key)
        if kept is not None:
            return kept[0]
        others = self._running.get(key)
        if others is not None:
            others.append(asker)
            return Running(others[0])
        self._running[key] = [asker]
        return New()

    def end(self, key: Key, answer: Answer, num_bytes: int) -> list[_Asker]:
        """Keep an answer; return who else asked for it.

        Args:
          key: Of a call that `begin` called new.
          answer: What its first asker was sent.
          num_bytes: What keeping it costs.
        """
        self._answers[key] = answer, num_bytes
        self._num_bytes += num_bytes
        while self._answers and (
            len(self._answers) > self._max_answers or self._num_bytes > self._max_bytes
        ):
            _, (_, freed) = self._answers.popitem(last=False)
            self._num_bytes -= freed
        return self._running.pop(key, [])[1:]

    def forget(self, key: Key) -> list[_Asker]:
        """Take back a `begin` whose call did not run; return who else asked."""
        return self._running.pop(key, [])[1:]


def size_of(value: Any, *, depth: int = 4) -> int:
    """Estimate the bytes that keeping a value costs, without encoding it."""
    if type(value) is EncodedOnce:
        value = value.value
    num_bytes = getattr(value, "nbytes", None)
    if isinstance(num_bytes, int):
        return 64 + num_bytes
    if isinstance(value, str | bytes | bytearray):
        return 64 + len(value)
    if depth and isinstance(value, dict):
        value = value.values()
    elif not depth or not isinstance(value, list | tuple):
        return 64
    return 64 + sum(size_of(item, depth=depth - 1) for item in value)
