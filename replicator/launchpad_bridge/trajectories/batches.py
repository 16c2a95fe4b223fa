"""Batches for a learner, taken from a table and put on devices ahead of time.

    thread:  take for update u+1 ── put on devices ── ready ─┐   while update u runs
    learner: next() ◀────────────────────────────────────────┘

The thread knows the update that each batch is for, so the bound of the policy lag and
its measure are those of the moment when the batch is learnt from, not when it is taken.

It outlives the table. When a call is lost, or the table says that it was started again,
the thread calls `begin` with the cut behind the last batch that it has got, and takes
the one after that: what is ready, or with the learner, was given out and is not lost;
what the table gave out and never arrived here is made again.
"""

import collections
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Self

import jax

from replicator.base.types import PyTree
from replicator.errors import (
    ArgumentError,
    CallTimeoutError,
    ConnectionLostError,
    InputTimeoutError,
    ServerStoppedError,
    check_count,
    check_function,
    check_whole,
)
from replicator.launchpad_bridge.trajectories.policy_lag import PolicyLag
from replicator.launchpad_bridge.trajectories.table import (
    Cut,
    Table,
    TableRestartedError,
    Taken,
)
from replicator.rpc.client.client import Client

_LOG = logging.getLogger(__name__)
_GONE = (ConnectionLostError, CallTimeoutError, ServerStoppedError)
_TAKE_S = 0.25  # how long one `take` waits in the table, and `close` for it
_CALL_S = 30.0  # deadline of a call: a batch of some GB may be on its way
_AGAIN_S = 0.2  # between a call that was lost and the next
_LOOK_S = 0.05  # how often a thread looks whether it is to stop
_WARN_S = 60.0
_CLOSE_S = 2.0


class ReadyBatch(NamedTuple):
    """A batch for one update.

    Attributes:
      batch: What `put` made of trajectories with leaves [batch_size, ...].
      lag: How many updates they have missed.
      cut: Where actors stand behind it; None where they take no turns.
      episodes: Returns of episodes that ended since the batch before.
    """

    batch: PyTree
    lag: PolicyLag
    cut: Cut | None
    episodes: list[float]


class StopFlag(Protocol):
    """What says that a program stops: an event."""

    def is_set(self) -> bool:
        """Return whether it does."""
        ...


class Batches:
    """Gives a learner its batches; `next` may be called by one thread.

    >>> with Batches(table, batch_size=32, put=jax.device_put) as batches:
    ...     while (ready := batches.next(lp.stop_event())) is not None:
    ...         state, metrics = step(state, ready.batch)
    """

    def __init__(
        self,
        table: Table | Client,
        *,
        batch_size: int,
        update: int = 0,
        cut: Cut | None = None,
        max_policy_lag: int | None = None,
        ahead: int = 1,
        put: Callable[[PyTree], PyTree] = lambda batch: batch,
        timeout_s: float = 600.0,
    ) -> None:
        """Start to take the first batch.

        Args:
          table: Of this process, or a client of one.
          batch_size: Trajectories in a batch.
          update: How many updates are done: the first batch is for the next one.
          cut: Of the batch of the last update, where actors take turns.
          max_policy_lag: Trajectories that have missed more updates than this when
            they would be learnt from are dropped; None drops none.
          ahead: Most batches that are taken beside the one the learner has.
          put: Makes of a batch on the host what `next` returns, in the background.
          timeout_s: Longest wait for the trajectories of one batch, also while the
            table is gone.

        Raises:
          ArgumentError: An argument breaks its rule.
        """
        check_count("batch_size", batch_size)
        check_count("ahead", ahead)
        check_whole("update", update)
        check_function("put", put, "batch")
        if max_policy_lag is not None and max_policy_lag < 0:
            raise ArgumentError(
                f"`max_policy_lag` must be 0 or more, got {max_policy_lag}. Use 10."
            )
        if cut is not None and cut.batch != update:
            raise ArgumentError(
                f"`cut` must be of the last update, got one behind batch {cut.batch} "
                f"for {update} updates. Save both in the same checkpoint."
            )
        self._batch_size = batch_size
        self._max_policy_lag = max_policy_lag
        self._ahead = ahead
        self._put = put
        self._source = _Source(table, cut, timeout_s)
        # Guards `_ready`, `_error` and `_stall_s`; no call is made while it is held.
        self._changed = threading.Condition()
        self._ready: collections.deque[ReadyBatch] = collections.deque()
        self._error: BaseException | None = None
        self._stall_s = 0.0
        self._thread = threading.Thread(
            target=self._fill,
            args=(int(update), bool(jax.config.read("jax_enable_x64"))),
            name="replicator-batches",
            daemon=True,
        )
        self._thread.start()

    def next(self, stop_event: StopFlag | None = None) -> ReadyBatch | None:
        """Return the batch of the next update; None once the event is set.

        Args:
          stop_event: Of the program; also `close` ends the wait.

        Raises:
          InputTimeoutError: It was not there within `timeout_s`; it says why.
          Exception: What the table or `put` raised.
        """
        started_s = time.monotonic()
        with self._changed:
            try:
                while not (stop_event is not None and stop_event.is_set()):
                    if self._ready:
                        self._changed.notify_all()
                        return self._ready.popleft()
                    if self._error is not None:
                        raise self._error
                    if self._source.closed.is_set():
                        return None
                    self._changed.wait(_LOOK_S)
                return None
            finally:
                self._stall_s += time.monotonic() - started_s

    def statistics(self) -> dict[str, Any]:
        """Return what happened: waits of the learner, lost calls, restarted tables."""
        with self._changed:
            return {
                "ready": len(self._ready),
                "stall_s": self._stall_s,
                "lost_calls": self._source.lost_calls,
                "restarts": self._source.restarts,
            }

    def close(self) -> None:
        """End the thread and drop what is ready; closing twice is fine."""
        self._source.closed.set()
        with self._changed:
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _LOG.warning(
                "The thread that takes batches still runs %.0f s after it was told to "
                "end: `put`, or the table in this process, takes so long.",
                _CLOSE_S,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, update: int, x64: bool) -> None:
        """Make batches until `close`, or something fails; the thread's body."""
        try:
            # JAX keeps this setting by thread: `put` casts as the learner would.
            with jax.enable_x64(x64):
                while self._wait_for_place() and self._add_batch(update):
                    update += 1
        except BaseException as error:  # raised again by `next`
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wait_for_place(self) -> bool:
        """Wait until a batch may be taken; return False once it is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._source.closed.is_set() or len(self._ready) < self._ahead
            )
        return not self._source.closed.is_set()

    def _add_batch(self, update: int) -> bool:
        """Make the batch of an update ready; return False once it is closed.

        When it returns, this thread holds nothing of the batch any more.
        """
        lag = self._max_policy_lag
        oldest = None if lag is None else update - lag
        taken = self._source.take(self._batch_size, update=update, oldest=oldest)
        if taken is None:
            return False
        batch = ReadyBatch(
            batch=self._put(taken.trajectories),
            lag=PolicyLag.at(update, taken.versions),
            cut=taken.cut,
            episodes=list(taken.episodes),
        )
        with self._changed:
            self._ready.append(batch)
            self._changed.notify_all()
        return True


class _Source:
    """A table that may be gone for a while; only the thread of `Batches` calls it.

    Attributes:
      closed: Ends every wait here.
      lost_calls: Calls without an answer so far.
      restarts: How often the table had to be told where the learner stands, again.
    """

    def __init__(
        self, table: Table | Client, cut: Cut | None, timeout_s: float
    ) -> None:
        self.closed = threading.Event()
        self.lost_calls = 0
        self.restarts = 0
        self._table = table
        self._cut = cut  # behind the last batch that arrived
        self._timeout_s = timeout_s
        self._call_s = min(_CALL_S, timeout_s)
        self._has_begun = False

    def take(self, count: int, *, update: int, oldest: int | None) -> Taken | None:
        """Return the batch of an update; None once it is closed.

        Raises:
          InputTimeoutError: It was not there within the limit.
          ArgumentError: The table is at another batch.
        """
        started_s = warned_s = time.monotonic()
        while not self.closed.is_set():
            taken, lost = self._try_to_take(count, oldest)
            if taken is not None:
                _check_batch(taken, update)
                self._cut = taken.cut
                return taken
            now_s = time.monotonic()
            if now_s - started_s >= self._timeout_s:
                raise InputTimeoutError(
                    f"The batch of update {update} must be there within "
                    f"{self._timeout_s:g} s: {self._why(count, oldest, lost)}. "
                    "Look at the actors and the table, or raise `timeout_s`."
                )
            if now_s - warned_s >= _WARN_S:
                warned_s = now_s
                _LOG.warning(
                    "Waited %.0f s for the batch of update %d: %s",
                    now_s - started_s,
                    update,
                    self._why(count, oldest, lost),
                )
        return None

    def _try_to_take(
        self, count: int, oldest: int | None
    ) -> tuple[Taken | None, Exception | None]:
        """Take once; return also why the table is not there, where it is not."""
        try:
            if not self._has_begun:
                self._ask("begin", cut=self._cut)
                self._has_begun = True
            arguments = {"count": count, "oldest": oldest, "timeout_s": _TAKE_S}
            return self._ask("take", **arguments), None
        except TableRestartedError:
            self.restarts += 1
            lost = None
        except _GONE as error:
            # What it was to give us may have been given, to nobody.
            self.lost_calls += 1
            lost = error
        self._has_begun = False
        self.closed.wait(_AGAIN_S)
        return None, lost

    def _ask(self, method: str, **arguments: Any) -> Any:
        """Call the table; return None at once when it is closed."""
        if not isinstance(self._table, Client):
            return getattr(self._table, method)(**arguments)
        future = self._table.futures.call(method, (), arguments, timeout_s=self._call_s)
        while not concurrent.futures.wait([future], _LOOK_S).done:
            if self.closed.is_set():
                future.cancel()
                return None
        return future.result()

    def _why(self, count: int, oldest: int | None, lost: Exception | None) -> str:
        if lost is None:
            try:
                said: Mapping[str, Any] = self._ask("statistics") or {}
            except _GONE as error:
                lost = error
            else:
                next_one = said.get("waiting_for")
                return (
                    f"{said.get('waiting')} of {count} trajectories"
                    f"{'' if oldest is None else f' of version {oldest} or later'} are "
                    f"there{f', and {next_one} is next' if next_one else ''}"
                )
        return f"the table does not answer ({lost})"


def _check_batch(taken: Taken, update: int) -> None:
    """Refuse the batch of another update, where they are numbered."""
    if taken.cut is not None and taken.cut.batch != update + 1:
        raise ArgumentError(
            f"`cut` must be given to go on after {update} updates, got none: the table "
            f"began anew, at batch {taken.cut.batch - 1}. Pass that of the checkpoint."
        )
