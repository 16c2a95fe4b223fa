"""Run concurrent calls of one method together: `@batched_handler(batch_size=32)`.

Each caller waits in its own thread, and the one that completes a batch runs it for all;
no thread is started. So a server needs a pool of at least `batch_size` threads, or no
batch ever fills: it then runs when its time is over, and the server warns once.

    caller 1 ── joins ── waits, watches the time ───────────── row 0
    caller 2 ── joins ── waits ─────────────────────────────── row 1
    caller 3 ── joins: full ── merge ── function ── split ──── row 2

`batch_forming` decides which calls run together and when, `batches` merges and splits
values; here are the lock, the waiting and the errors.
"""

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

from replicator.base.types import PyTree
from replicator.errors import (
    ArgumentError,
    CallCancelledError,
    check_count,
    check_not_async,
)
from replicator.rpc.batching.batch_forming import Batch, BatchQueue, BatchRules
from replicator.rpc.batching.batches import fit_of, merge, split
from replicator.rpc.server.served_call import current_call, running_here

_LOG = logging.getLogger(__name__)
_LONGEST_WAIT_S = 60.0  # then the log names what is waited for
_LOOK_S = 1.0  # how often a call that came by RPC looks whether anybody waits for it
# Guards the meetings of all objects, while one is made. No lock is taken under it.
_BINDING = threading.Lock()


def batched_handler(
    batch_size: int,
    *,
    max_parallelism: int = 1,
    timeout_s: float = 0.2,
    pad_batch: bool = False,
    isolate_errors: bool = True,
) -> Callable[[Callable[..., PyTree]], "BatchedHandler"]:
    """Let up to `batch_size` concurrent calls be one call of the function.

    Use it as a decorator of a method, or on a bound one:
    `self.predict = batched_handler(32)(self.predict)`. Positional and named arguments
    are merged as in `batches`: arrays get a new first axis, numbers become 1-d
    arrays, anything else a list. Calls whose structure, shapes, dtypes or types differ
    do not meet: each kind fills batches of its own. The caller gets its row of the
    result, whether the call came by RPC or from a thread of the same process. A call
    whose deadline passes, or that is cancelled, leaves its batch; since a batch has
    several callers, `current_call()` is None inside of the function.

    Args:
      batch_size: Number of calls in a full batch, which runs at once.
      max_parallelism: Number of batches that run at the same time.
      timeout_s: Seconds that a batch waits, from its first call, before it runs with
        fewer. Past that it goes on filling while `max_parallelism` others run.
      pad_batch: Repeat the first call up to `batch_size`, so that a jitted function
        sees one shape and compiles once; what it returns for these is dropped.
      isolate_errors: When the function raises, call it again with each call alone,
        so that only the bad one fails. Then it may run twice for a call: switch it
        off, and all fail together, where that does harm.

    Returns:
      A decorator that makes a `BatchedHandler` of a function.

    Raises:
      ArgumentError: A number is out of range.

    >>> class Doubler:
    ...     @batched_handler(batch_size=8, timeout_s=0)
    ...     def double(self, numbers):
    ...         return 2 * numbers  # an array: one number of each call
    >>> int(Doubler().double(21))
    42
    """
    check_count("batch_size", batch_size)
    check_count("max_parallelism", max_parallelism)
    if not 0 <= timeout_s <= threading.TIMEOUT_MAX:
        raise ArgumentError(
            f"`timeout_s` must be 0 or more seconds, got {timeout_s}. Use 0.2."
        )
    rules = BatchRules(
        batch_size=batch_size,
        max_parallelism=max_parallelism,
        timeout_s=timeout_s,
        pad_batch=pad_batch,
        isolate_errors=isolate_errors,
    )
    return lambda fn: BatchedHandler(fn, rules)


class BatchedHandler:
    """A function whose concurrent calls run together; made by `batched_handler`."""

    def __init__(
        self,
        fn: Callable[..., PyTree],
        rules: BatchRules,
        meeting: "_Meeting | None" = None,
    ) -> None:
        check_not_async("fn", fn)
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._rules = rules
        self._meeting = meeting or _Meeting(rules, _name_of(fn))
        self._key = f"{_name_of(fn)} (batched)"

    @property
    def batch_size(self) -> int:
        """Calls in a full batch: a server needs at least as many threads."""
        return self._rules.batch_size

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Wait for others, run together, return the row of this call.

        Raises:
          BatchError: The function returned what cannot be split over the calls.
        """
        return self._meeting.attend(self._fn, args, kwargs)

    def __set_name__(self, owner: type, name: str) -> None:
        # A method and the one that it overrides must not share a batch.
        self._key = f"{owner.__module__}.{owner.__qualname__}.{name} (batched)"

    def __get__(self, instance: object, owner: type | None = None) -> "Self":
        """Bind to an object; calls of different objects never meet."""
        if instance is None:
            return self
        kept: dict[str, Any] | None = getattr(instance, "__dict__", None)
        if kept is None:
            raise ArgumentError(
                f"`{_name_of(self._fn)}` must belong to a class without `__slots__`, "
                f"got {type(instance).__name__}. Leave them out."
            )
        with _BINDING:
            meeting = kept.get(self._key)
            # A copy of an object comes with the meeting of the one it was made of.
            if meeting is None or meeting.owner != id(instance):
                meeting = _Meeting(self._rules, _name_of(self._fn), id(instance))
                kept[self._key] = meeting
        return type(self)(self._fn.__get__(instance, owner), self._rules, meeting)


class _Row(NamedTuple):
    """Result of a call."""

    value: PyTree


class _Failure(NamedTuple):
    """Error of a call."""

    error: BaseException


_Outcome: TypeAlias = _Row | _Failure


class _Call:
    """A call that waits, in a thread of its own, for an item in its inbox.

    An item is a batch to run, a time at which it must look whether its batch may run,
    or its outcome. Others put items, under the meeting's lock but for outcomes.
    """

    __slots__ = ("arguments", "has_left", "inbox", "served", "started_s", "warn_s")

    def __init__(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> None:
        self.arguments = args, kwargs
        self.has_left = False
        self.inbox: queue.SimpleQueue[Batch | float | _Outcome] = queue.SimpleQueue()
        self.served = current_call()
        self.started_s = time.monotonic()
        self.warn_s = _LONGEST_WAIT_S

    def is_wanted(self) -> bool:
        """Return whether its caller still waits for the row."""
        return not (self.has_left or (self.served and self.served.is_cancelled()))

    def patience_s(self) -> float:
        """Return how long it may wait without looking whether it is wanted."""
        if self.served is None:
            return _LONGEST_WAIT_S
        left_s = self.served.deadline_s - time.monotonic()
        return min(_LOOK_S, max(0.0, left_s))


class _Meeting:
    """Meeting of the concurrent calls of one function of one object.

    The lock guards the batches and the order in which inboxes are filled from them; no
    function of the user runs under it, and no other lock is taken.
    """

    def __init__(self, rules: BatchRules, name: str, owner: int | None = None) -> None:
        self.owner = owner
        self._rules = rules
        self._name = name
        self._lock = threading.Lock()  # see above
        self._batches = BatchQueue(rules)

    def __reduce__(self) -> tuple[type, tuple[BatchRules, str]]:
        # An object that is copied or pickled takes its rules along, not its callers.
        return _Meeting, (self._rules, self._name)

    def attend(
        self, fn: Callable[..., PyTree], args: tuple, kwargs: Mapping[str, PyTree]
    ) -> PyTree:
        """Make one call; return its row or raise its error."""
        call = _Call(args, kwargs)
        fit = fit_of(call.arguments)
        try:
            with self._lock:
                self._act(self._batches.join(call, fit, call.started_s))
            outcome = self._wait_outcome(fn, call)
        except BaseException:
            self._leave(call)
            raise
        if isinstance(outcome, _Row):
            return outcome.value
        try:
            raise outcome.error
        finally:
            del outcome  # it would hold its own traceback, and with it the arguments

    def _wait_outcome(self, fn: Callable[..., PyTree], call: _Call) -> _Outcome:
        watch_s: float | None = None
        while True:
            now_s = time.monotonic()
            if watch_s is not None and watch_s <= now_s:
                watch_s = None
                with self._lock:
                    self._act()
            patience_s = call.patience_s()
            if watch_s is not None:
                patience_s = min(patience_s, watch_s - now_s)
            try:
                news = call.inbox.get(timeout=patience_s)
            except queue.Empty:
                self._raise_if_over(call)
                continue
            match news:
                case Batch():
                    self._run(fn, news.calls)
                case _Row() | _Failure():
                    return news
                case _:
                    watch_s = news

    def _run(self, fn: Callable[..., PyTree], calls: Sequence[Any]) -> None:
        """Run a batch in this thread; put each outcome into its inbox."""
        own, running_here.call = running_here.call, None
        try:
            wanted = [call for call in calls if call.is_wanted()]
            for call, outcome in zip(wanted, self._outcomes(fn, wanted), strict=True):
                call.inbox.put(outcome)
        except BaseException as error:
            # An interrupt is for this thread: the others get an error.
            why = f"{type(error).__name__} ended `{self._name}` while it ran for others"
            for call in calls:
                call.inbox.put(_Failure(CallCancelledError(f"{why}. Call again.")))
            raise
        finally:
            running_here.call = own
            # Always, or the batch would count as running for good.
            with self._lock:
                self._finish()

    def _outcomes(
        self, fn: Callable[..., PyTree], calls: Sequence[_Call]
    ) -> Iterator[_Outcome]:
        """Call the function for all; if it raises, for each alone."""
        if not calls:
            return
        size = self._rules.batch_size if self._rules.pad_batch else len(calls)
        try:
            args, kwargs = merge([call.arguments for call in calls], size=size)
            result = fn(*args, **kwargs)
        except Exception as error:
            if len(calls) == 1 or not self._rules.isolate_errors:
                yield from [_Failure(error)] * len(calls)
                return
            for call in calls:
                yield from self._outcomes(fn, [call])
            return
        try:
            yield from map(
                _Row, split(result, size=size, name=self._name)[: len(calls)]
            )
        except Exception as error:
            yield from [_Failure(error)] * len(calls)

    def _leave(self, call: _Call) -> None:
        """Take a call out whose caller is gone; hand on the batch it had to run."""
        with self._lock:
            call.has_left = True
            self._act(self._batches.leave(call))
            # Each batch is put under the lock, so none comes after this look.
            while not call.inbox.empty():
                news = call.inbox.get_nowait()
                if isinstance(news, Batch):
                    self._hand_on(news)

    def _hand_on(self, batch: Batch) -> None:
        for call in batch.calls:
            if not call.has_left:
                call.inbox.put(batch)
                return
        self._finish()

    def _finish(self) -> None:
        self._batches.running -= 1
        self._act()

    def _act(self, watched: Batch | None = None) -> None:
        """Let start what may; let the first of a batch that waits watch the time."""
        for batch in self._batches.start(time.monotonic()):
            batch.calls[-1].inbox.put(batch)
        if watched is not None and watched in self._batches.waiting:
            watched.calls[0].inbox.put(watched.due_s)

    def _raise_if_over(self, call: _Call) -> None:
        waited_s = time.monotonic() - call.started_s
        running, waiting = self._batches.running, len(self._batches.waiting)
        text = (
            f"a call of `{self._name}` has waited {waited_s:.3g} s: {running} batches "
            f"of it run, {waiting} wait"
        )
        if call.served is not None and call.served.is_given_up:
            raise CallCancelledError(f"Nobody waits any more: {text}.")
        if call.patience_s() <= 0:
            # Of a builtin type, which is caught as such in the caller's process.
            raise TimeoutError(f"The deadline passed: {text}.")
        if waited_s >= call.warn_s:
            call.warn_s += _LONGEST_WAIT_S
            _LOG.warning(text)


def _name_of(fn: Callable[..., PyTree]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
