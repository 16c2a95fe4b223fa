"""A node that caches the replies of another node, up to an age.

A hundred actors that request a learner's parameters keep it busy with replies. A cacher
calls once in an interval, however many call it, and replies from its cache; never with
a reply older than `stale_after_ms`: then it calls, and the caller waits.
"""

import dataclasses
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
"""Most calls (a method and its arguments) in the cache of one node."""
_LOOK_S = 0.25  # between two checks of a waiting call that its caller still waits
# They are kept in the cache, so their size is bounded.
_ARGUMENTS = plain(4_096, most_text=65_536)._replace(
    remedy="Call the target of the CacherNode."
)
_PLAIN = (bool, int, float, str, bytes, type(None))


class CacherNode(CourierNode[Any]):
    """Has the methods of another node, and replies from a cache.

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
        """Set the target and the times.

        Args:
          target_handle: Handle of the node whose replies are cached.
          refresh_interval_ms: Time after which each cached call is made again.
          stale_after_ms: Age, since the call to the target, from which on a reply is
            no longer used.
          courier_kwargs: See `CourierNode`.
          courier_client_kwargs: See `CourierNode`.

        Raises:
          ProgramError: A reply would be too old before it is refreshed.
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
        """Return the target's methods; wait, within its deadline, until it serves."""
        return [
            method_of_function(name, functools.partial(instance.answer, name))
            for name in list_methods(instance.target)
        ]


class _Entry(NamedTuple):
    asked_s: float
    value: PyTree


_NEVER = _Entry(-math.inf, None)


class _Known:
    """One call in the cache."""

    def __init__(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> None:
        self.args = args
        self.kwargs = kwargs
        # Held by the thread that calls the target, while others with the same call wait
        # for it. A refresh does without: it replaces `entry`.
        self.lock = threading.Lock()
        self.entry = _NEVER
        self.is_asked = False

    def renew(self, entry: _Entry) -> None:
        """Store a reply, unless a later one is stored."""
        if entry.asked_s >= self.entry.asked_s:
            self.entry = entry


@dataclasses.dataclass(eq=False)
class Cacher:
    """Replies from a cache, and refreshes it in the background.

    Attributes:
      target: Client of the node whose replies are cached.
      refresh_interval_s: Seconds between two refreshes.
      stale_after_s: Age from which on a reply is not used.
      now_s: Returns the time in seconds.
    """

    target: Client
    refresh_interval_s: float
    stale_after_s: float
    now_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # Guards `_known`; never held together with the lock of a call.
        self._lock = threading.Lock()
        self._known: dict[Any, _Known] = {}

    def run(self) -> None:
        """Make each cached call again, once in an interval, until the stop."""
        while not stop_event().wait(self.refresh_interval_s):
            self.refresh()

    @accepts(method=text(), args=_ARGUMENTS, kwargs=_ARGUMENTS)
    def answer(self, method: str, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return the cached reply if it is fresh; otherwise call the target.

        Raises:
          ArgumentError: An argument is not a plain value, or there are too many,
            or too many different calls.
        """
        known = self._known_of(method, args, kwargs)
        # Before the lock: a refresh may have stored a reply while a call still runs.
        if self._is_fresh(entry := known.entry):
            return entry.value
        # Equal calls wait for the reply of the first, while their callers wait.
        while not known.lock.acquire(timeout=_LOOK_S):
            if cancelled():
                raise CallCancelledError(f"Nobody waits for `{method}` any more.")
        try:
            if not self._is_fresh(entry := known.entry):
                asked_s = self.now_s()
                entry = _Entry(asked_s, self.target.call(method, args, kwargs))
                known.renew(entry)
            return entry.value
        finally:
            known.lock.release()

    def refresh(self) -> None:
        """Make all cached calls again, concurrently; wait for none."""
        with self._lock:
            calls = list(self._known.items())
        for (method, *_), known in calls:
            if known.entry is _NEVER or known.is_asked:
                continue
            known.is_asked = True
            asked_s = self.now_s()
            future = self.target.futures.call(method, known.args, known.kwargs)
            future.add_done_callback(functools.partial(self._take, known, asked_s))

    def _take(self, known: _Known, asked_s: float, future: Any) -> None:
        known.is_asked = False
        # An error of a refresh is dropped: callers get one once the reply is stale.
        if not future.cancelled() and future.exception() is None:
            known.renew(_Entry(asked_s, future.result()))

    def _is_fresh(self, entry: _Entry) -> bool:
        return self.now_s() - entry.asked_s <= self.stale_after_s

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
    """Return a hashable key of plain values, in which 1, True and 1.0 differ."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, dict):
        items = sorted((repr(k), _frozen(v)) for k, v in value.items())
        return (dict, *((key, frozen) for key, frozen in items))
    return (type(value), *(_frozen(part) for part in value))
