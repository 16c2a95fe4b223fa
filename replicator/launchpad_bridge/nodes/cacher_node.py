"""A node that stands before another and remembers its answers, up to an age.

A hundred actors that ask a learner for its parameters keep it busy with answering. A
cacher asks once in an interval, whoever asks it, and answers from what it remembers;
never with something older than `stale_after_ms`: then it asks, and the caller waits.
"""

import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from replicator.base.accepts import accepts, plain, text
from replicator.base.types import PyTree
from replicator.errors import ArgumentError, CallCancelledError, ProgramError
from replicator.launchpad_bridge.handles import Handle
from replicator.launchpad_bridge.nodes.courier_node import CourierNode
from replicator.launchpad_bridge.running.stopping import stop_event
from replicator.rpc.client.client import Client, list_methods
from replicator.rpc.server.methods import Method, method_of_function
from replicator.rpc.server.served_call import cancelled

MAX_CALLS = 16
"""Different calls (a method and its arguments) that one cacher remembers."""
_LOOK_S = 0.25  # how often a call that waits looks whether anybody waits for it
# They are kept.
_ARGUMENTS = plain(4_096, most_text=65_536)._replace(
    remedy="Call the target of the CacherNode."
)
_PLAIN = (bool, int, float, str, bytes, type(None))


class CacherNode(CourierNode[Any]):
    """Offers the methods of another node, and answers from memory.

    >>> learner = program.add_node(lp.CourierNode(Learner), label="learner")
    >>> cacher = program.add_node(
    ...     lp.CacherNode(learner, refresh_interval_ms=2000, stale_after_ms=4000),
    ...     label="cacher",
    ... )
    """

    def __init__(
        self,
        target_handle: Handle[Client],
        refresh_interval_ms: float,
        stale_after_ms: float,
        *,
        courier_kwargs: Mapping[str, Any] | None = None,
        courier_client_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Remember whom to ask, and how often.

        Args:
          target_handle: Of the node whose answers are remembered.
          refresh_interval_ms: How often each remembered call is made again.
          stale_after_ms: The age, since it was asked for, from which on an answer is
            not given any more.
          courier_kwargs: As of a `CourierNode`.
          courier_client_kwargs: As of a `CourierNode`.

        Raises:
          ProgramError: An answer would be too old before it is asked for again.
        """
        if not 0 < refresh_interval_ms <= stale_after_ms:
            raise ProgramError(
                "`refresh_interval_ms` must be more than 0 and at most "
                f"`stale_after_ms`, got {refresh_interval_ms} and {stale_after_ms}. "
                "Use 2000 and 4000."
            )
        super().__init__(
            Cacher,
            target_handle,
            refresh_interval_ms / 1e3,
            stale_after_ms / 1e3,
            courier_kwargs=courier_kwargs,
            courier_client_kwargs=courier_client_kwargs,
        )

    def methods(self, instance: Any) -> list[Method]:
        """Return those of the target; waits, within its deadline, until it serves."""
        return [
            method_of_function(name, functools.partial(instance.answer, name))
            for name in list_methods(instance.target)
        ]


class _Entry(NamedTuple):
    asked_s: float
    value: PyTree


_NEVER = _Entry(-math.inf, None)


class _Known:
    """One call that is remembered."""

    def __init__(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> None:
        self.args = args
        self.kwargs = kwargs
        # Held during a call to the target, by who made it and all who ask the same. A
        # refresh does without: it replaces `entry`.
        self.lock = threading.Lock()
        self.entry = _NEVER
        self.is_asked = False

    def renew(self, entry: _Entry) -> None:
        """Take an answer, unless a later one is known."""
        if entry.asked_s >= self.entry.asked_s:
            self.entry = entry


class Cacher:
    """Answers from memory, and asks again in the background."""

    def __init__(
        self,
        target: Client,
        refresh_interval_s: float,
        stale_after_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remember nothing yet.

        Args:
          target: Whom to ask.
          refresh_interval_s: How often.
          stale_after_s: From which age on an answer is not given.
          now_s: Tells the time.
        """
        self.target = target
        self._refresh_interval_s = refresh_interval_s
        self._stale_after_s = stale_after_s
        self._now_s = now_s
        # Of the table only; never held together with the lock of a call.
        self._lock = threading.Lock()
        self._known: dict[Any, _Known] = {}

    def run(self) -> None:
        """Make each remembered call again, once in an interval, until the stop."""
        while not stop_event().wait(self._refresh_interval_s):
            self.refresh()

    @accepts(method=text(), args=_ARGUMENTS, kwargs=_ARGUMENTS)
    def answer(self, method: str, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return what the target answered not long ago; ask it if that is not known.

        Raises:
          ArgumentError: An argument is no plain value, or there are too many of them,
            or too many different calls.
        """
        known = self._known_of(method, args, kwargs)
        # A refresh may have answered while somebody still waits for the target.
        if self._is_fresh(entry := known.entry):
            return entry.value
        # Others who ask the same wait for this answer, while somebody waits for them.
        while not known.lock.acquire(timeout=_LOOK_S):
            if cancelled():
                raise CallCancelledError(f"Nobody waits for `{method}` any more.")
        try:
            if not self._is_fresh(entry := known.entry):
                asked_s = self._now_s()
                entry = _Entry(asked_s, self.target.call(method, args, kwargs))
                known.renew(entry)
            return entry.value
        finally:
            known.lock.release()

    def refresh(self) -> None:
        """Ask again for all that is known, at the same time; wait for nothing."""
        with self._lock:
            calls = list(self._known.items())
        for (method, *_), known in calls:
            if known.entry is _NEVER or known.is_asked:
                continue
            known.is_asked = True
            asked_s = self._now_s()
            future = self.target.futures.call(method, known.args, known.kwargs)
            future.add_done_callback(functools.partial(self._take, known, asked_s))

    def _take(self, known: _Known, asked_s: float, future: Any) -> None:
        known.is_asked = False
        # A refresh that failed is no news: callers are told once the answer is stale.
        if not future.cancelled() and future.exception() is None:
            known.renew(_Entry(asked_s, future.result()))

    def _is_fresh(self, entry: _Entry) -> bool:
        return self._now_s() - entry.asked_s <= self._stale_after_s

    def _known_of(
        self, method: str, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> _Known:
        key = method, _frozen(args), _frozen(kwargs)
        with self._lock:
            if key not in self._known and len(self._known) >= MAX_CALLS:
                raise ArgumentError(
                    f"A CacherNode must hold at most {MAX_CALLS} different calls, got "
                    f"one more, of `{method}`. Call its target for what changes."
                )
            return self._known.setdefault(key, _Known(args, kwargs))


def _frozen(value: PyTree) -> Any:
    """Return what stands for plain values in a key; tells 1 from True and 1.0."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, dict):
        items = sorted((repr(k), _frozen(v)) for k, v in value.items())
        return (dict, *((key, frozen) for key, frozen in items))
    return (type(value), *(_frozen(part) for part in value))
