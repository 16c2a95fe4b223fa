"""Make calls: try, and try again where that does no harm.

    call ─▶ connected? ─no─▶ connect, say hello ─▶ send ─▶ answered ─▶ value, or error
              ▲                                      │
              └────── wait a little ◀── may be tried again? (`retry`) ──no──▶ error

A call of an idempotent method that may have run is made again, so it may run more than
once. No other call runs twice: what may have run raises an error instead.
"""

import contextlib
import dataclasses
import itertools
import math
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import InvalidStateError
from typing import NamedTuple

from replicator.base.host.forks import register_fork_drop
from replicator.base.types import PyTree
from replicator.errors import (
    CallCancelledError,
    EncodeError,
    MessageTooLargeError,
    RpcError,
    ServerStoppedError,
)
from replicator.rpc import answers
from replicator.rpc.arrivals import checked
from replicator.rpc.client import call_errors, retry
from replicator.rpc.client.call_errors import CallTarget
from replicator.rpc.client.call_futures import CallFuture
from replicator.rpc.client.connector import Connector
from replicator.rpc.client.link import Answer, Failure, Link
from replicator.rpc.client.request import Request, body_of
from replicator.rpc.client.resending import Resender
from replicator.rpc.client.retry import Again, OutOfTime, TryOutcome
from replicator.rpc.codec.registry import Registry
from replicator.rpc.own_methods import HELLO
from replicator.rpc.protocols import Message, MessageKind
from replicator.rpc.remote_errors import ErrorInfo, remote_error

_REPLY = int(MessageKind.REPLY)
_RESEND_TIMEOUT_S = 1.0


class Done(NamedTuple):
    """Result of a call."""

    value: PyTree


class Failed(NamedTuple):
    """Error of a call."""

    error: Exception


@dataclasses.dataclass(eq=False)
class Calls:
    """The calls of one client; the first one connects.

    Attributes:
      connector: Makes links to the server.
      address: Address of the server, for errors.
      registry: Classes whose exceptions are known here.
      wait_for_ready: Whether calls wait for a server that is not there; may be changed
        at any time, also for pending calls.
    """

    connector: Connector
    _: dataclasses.KW_ONLY
    address: str
    registry: Registry
    wait_for_ready: bool

    def __post_init__(self) -> None:
        # `next` of it is atomic: any thread may make calls.
        self._ids = itertools.count(1)
        # Set by `close` and never cleared; also cuts short the wait between two tries.
        self._closed = threading.Event()
        self._resender = Resender()
        register_fork_drop(self)

    def drop_after_fork(self) -> None:
        """Make no calls in this forked child; its parent's calls go on there."""
        # New objects: a thread of the parent may have held the locks of the old ones.
        waiting = [*self.connector.drop_after_fork(), *self._resender.waiting()]
        self._closed, self._resender = threading.Event(), Resender()
        for future in waiting:
            if isinstance(future, CallFuture):
                future.inherited = call_errors.inherited(self.address)

    def call(
        self,
        method: str,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        timeout_s: float | None,
    ) -> PyTree:
        """Make a call and wait for its result."""
        body = body_of(method, args, kwargs, timeout_s)
        call_id = next(self._ids)
        started_s = time.monotonic()
        deadline_s = math.inf if timeout_s is None else started_s + timeout_s
        # Read once, without a lock: it may be lost at any time, which `ask` reports.
        link = self.connector.link
        answer = None
        if link is not None:
            try:
                answer = link.ask(call_id, body, timeout_s, deadline_s)
            except (EncodeError, MessageTooLargeError) as error:
                raise call_errors.unsendable(self._edge(method), error) from None
            if isinstance(answer, Message) and answer.kind == _REPLY:
                try:
                    return answer.payload.take()
                except RpcError as error:
                    raise call_errors.unreadable(self._edge(method), error) from None
        request = Request(call_id, body, started_s=started_s, deadline_s=deadline_s)
        try:
            return self._go_on(request, answer)
        finally:
            del answer  # as in `_go_on`: what is raised holds this frame

    def submit(
        self,
        method: str,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        timeout_s: float | None,
    ) -> CallFuture:
        """Make a call; return its result to be."""
        started_s = time.monotonic()
        request = Request(
            next(self._ids),
            body_of(method, args, kwargs, timeout_s),
            started_s=started_s,
            deadline_s=math.inf if timeout_s is None else started_s + timeout_s,
        )
        future = CallFuture(request, self._take)
        link = self.connector.link
        # Not connected here: a future never makes its caller wait for a server.
        if link is None:
            self._resender.put(future, 0.0, self._resend)
        else:
            self._start(future, link)
        return future

    def wait_until_ready(self, timeout_s: float | None) -> None:
        """Wait until the server answers, also if calls do not wait for it."""
        self.call(HELLO, [self.connector.name], {}, timeout_s)

    def close(self) -> None:
        """Give all calls up; take no more."""
        # First: a call that fails from now on is not tried again.
        self._closed.set()
        # Before the waiting futures are taken out: one that is put back after that
        # finds no link, and fails in its turn because the client is closed.
        self.connector.close()
        left = self._resender.take_all()
        for future in left:
            _set_error(future, self._closed_error(future.request.method))

    # Calls whose caller waits.

    def _go_on(self, request: Request, answer: Answer | None) -> PyTree:
        """Try until there is a result, or an error to raise."""
        while True:
            if answer is None:
                answer = self._try(request)
            step = self._step_after(request, answer)
            match step:
                case Done():
                    return step.value
                case Failed():
                    try:
                        raise step.error
                    finally:
                        # Its traceback holds this frame: no circle, which would keep
                        # the caller's arrays until the garbage collector comes.
                        del answer, step
            # Woken by `close`, which the next turn then finds.
            self._closed.wait(step.delay_s)
            answer = None

    def _try(self, request: Request) -> Answer:
        request.attempts += 1
        link = self.connector.connect(request.remaining_s)
        try:
            if isinstance(link, Failure):
                return link
            return link.ask(
                request.call_id, request.body(), request.timeout_s, request.deadline_s
            )
        except (EncodeError, MessageTooLargeError) as error:
            raise call_errors.unsendable(self._edge(request.method), error) from None
        finally:
            del link  # what a failure was caused by holds this frame

    # Calls that are futures.

    def _start(self, future: CallFuture, link: Link) -> None:
        """Send a future's call."""
        request = future.request
        future.link = link
        try:
            failure = link.start(future, request.body(), timeout_s=request.timeout_s)
        except (EncodeError, MessageTooLargeError) as error:
            raise call_errors.unsendable(self._edge(request.method), error) from None
        if failure is not None:
            self._take(future, failure)
        elif future.cancelled():
            # `cancel` may have come before the call was in the link's table.
            link.give_up(future)
        else:
            # After the call is in the table: a reader that goes to sleep looks there
            # once more, and one that sleeps is woken here.
            reader = link.reader  # None once the link is lost
            if reader is not None and reader.is_asleep:
                reader.wake()

    def _take(self, future: CallFuture, answer: Answer) -> None:
        """Make a result of an answer, or try again; never waits."""
        # Mostly in the thread that reads, with the role held: no call may be sent here,
        # and an error must not end that thread.
        try:
            step = self._step_after(future.request, answer)
            if isinstance(step, Again):
                self._resender.put(future, step.delay_s, self._resend)
                return
        except Exception as error:
            step = Failed(error)
        if isinstance(step, Failed):
            _set_error(future, step.error)
        else:
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                future.set_result(step.value)

    def _resend(self, futures: list[CallFuture]) -> None:
        """Try futures that wait for a server, all with one attempt to connect."""
        left_s = min(future.request.remaining_s for future in futures)
        try:
            link = self.connector.connect(min(left_s, _RESEND_TIMEOUT_S))
        except Exception as error:
            for future in futures:
                _set_error(future, error)
            return
        # Not in the reader's thread, and with no lock held: sending may block.
        for future in futures:
            future.request.attempts += 1
            future.is_sent = False
            try:
                if isinstance(link, Failure):
                    self._take(future, link)
                else:
                    self._start(future, link)
            except Exception as error:
                _set_error(future, error)

    # What follows a try.

    def _step_after(self, request: Request, answer: Answer) -> Done | Failed | Again:
        """Return what follows an answer, or the lack of one."""
        if self._closed.is_set():
            return Failed(self._closed_error(request.method))
        try:
            read = answer
            if not isinstance(read, Failure):
                read = self._read(request, read)
        except RpcError as error:
            return Failed(call_errors.unreadable(self._edge(request.method), error))
        if not isinstance(read, Failure):
            return read
        # A call that may have run is tried again only if its method is idempotent.
        decision = retry.decide(
            read.outcome,
            attempt=request.attempts,
            remaining_s=request.remaining_s,
            is_idempotent=self._may_repeat(request.method),
            wait_for_ready=self.wait_for_ready or request.method == HELLO,
            random=random.random,
        )
        if isinstance(decision, Again):
            return decision
        return Failed(self._error(request, read, isinstance(decision, OutOfTime)))

    def _read(self, request: Request, message: Message) -> Done | Failed | Failure:
        value = message.payload.take()
        if message.kind == _REPLY:
            return Done(value)
        edge = self._edge(request.method)
        why, details = answers.read_error(checked(MessageKind.ERROR, value))
        if isinstance(details, ErrorInfo):
            return Failed(
                remote_error(
                    details,
                    method=request.method,
                    server=edge.server,
                    address=edge.address,
                    registry=self.registry,
                )
            )
        if why == answers.EXPIRED:
            return Failed(call_errors.expired(edge, details))
        if why == answers.OVERRAN:
            return Failed(call_errors.overran(edge, details))
        if why == answers.ABANDONED:
            return Failure(TryOutcome.LOST, call_errors.abandoned(edge, details))
        return Failure(TryOutcome.REFUSED)

    def _error(self, request: Request, failure: Failure, is_late: bool) -> Exception:
        edge = self._edge(request.method)
        if isinstance(failure.cause, ServerStoppedError):
            return failure.cause
        if not is_late:
            return call_errors.failed(edge, failure, attempts=request.attempts)
        if failure.outcome in (TryOutcome.UNREACHABLE, TryOutcome.REFUSED):
            return call_errors.never_ready(edge, failure, waited_s=request.waited_s)
        return call_errors.late(
            edge, failure, waited_s=request.waited_s, attempts=request.attempts
        )

    def _closed_error(self, method: str) -> CallCancelledError:
        return CallCancelledError(
            f"{self._edge(method)} was given up: the client was closed. Make a new one."
        )

    def _edge(self, method: str) -> CallTarget:
        return CallTarget(method, self.connector.server, self.address)

    def _may_repeat(self, method: str) -> bool:
        return method in self.connector.retried or method.startswith("~")


def _set_error(future: CallFuture, error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
        future.set_exception(error)
