"""State shared by all connections of a server: methods, threads, pool, phase.

`server` starts and stops it, `served_connection` works with it.
"""

import dataclasses
import threading
from collections.abc import Mapping

from replicator.base.types import PyTree
from replicator.rpc.arrivals import checked
from replicator.rpc.call_statistics import CallRecords, ServerStatistics
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import Registry
from replicator.rpc.own_methods import HELLO, LIST_METHODS, PROTOCOL, STATISTICS
from replicator.rpc.server import selector_loop
from replicator.rpc.server.handler_pool import HandlerPool
from replicator.rpc.server.methods import Method
from replicator.rpc.server.read_handoff import ReadHandoff
from replicator.rpc.server.selector_loop import SelectorLoop
from replicator.rpc.server.served_call import Caller
from replicator.rpc.server.worker_threads import WorkerThreads

_MAX_NAME = 128
_MOST_CALLERS = 256
"""Most client names that are counted: names that change fill no memory."""


class Service:
    """Shared state of a server."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        *,
        label: str,
        pool_size: int,
        limits: MessageLimits,
        registry: Registry,
    ) -> None:
        self.methods = methods
        self.label = label
        self.limits = limits
        self.registry = registry
        # Cleared once, by `_stop`; read without a lock after each call is entered.
        self.takes_calls = True
        self.threads = WorkerThreads(f"rpc {label}")
        self.pool = HandlerPool(pool_size, self.threads)
        self.handoff = ReadHandoff()
        self.selector_loop = (
            SelectorLoop(self.handoff, self.threads)
            if selector_loop.IS_AVAILABLE
            else None
        )
        # Changed by single atomic operations only; whoever walks over it takes a copy.
        self.connections: set[Caller] = set()
        # Only added to, by `setdefault`, in any thread.
        self._callers: dict[str, CallRecords] = {}
        # Guards `_refused`; held for one addition, with no other lock taken under it.
        self._refused_lock = threading.Lock()
        # Set at the end of a call once `takes_calls` is false; wakes `stop`,
        # which looks every 50 ms anyway.
        self.call_ended = threading.Event()
        self._refused = 0

    @property
    def calls_left(self) -> int:
        """Return how many calls run or wait."""
        held = sum(len(caller.calls) for caller in self.connections.copy())
        return held or self.pool.num_running  # by handlers of clients that are gone

    def count_refusal(self) -> None:
        """Count a call that was answered without running it."""
        with self._refused_lock:
            self._refused += 1

    def statistics(self) -> ServerStatistics:
        """Return the statistics of this moment."""
        waiting = [call.method for call in self.pool.waiting()]
        running = [
            call.method
            for caller in self.connections.copy()
            for call in caller.calls.copy().values()
            if call.started_s
        ]
        return ServerStatistics(
            methods={
                name: method.records.summary(
                    queued=waiting.count(name), running=running.count(name)
                )
                for name, method in self.methods.items()
            },
            connections=len(self.connections),
            queued=len(waiting),
            running=len(running),
            pool_size=self.pool.size,
            refused=self._refused,
            callers={
                name: called
                for name, records in self._callers.copy().items()
                if (called := records.of_caller()).calls
            },
        )

    def answer(self, name: str, caller: Caller, args: PyTree) -> PyTree:
        """Answer a built-in method; LookupError if there is no such."""
        if name == HELLO:
            (client_name,) = checked(HELLO, args)
            caller.name = client_name[:_MAX_NAME] or None
            retried = [m.name for m in self.methods.values() if m.is_idempotent]
            return PROTOCOL, self.label, retried
        if name == LIST_METHODS:
            return sorted(self.methods)
        if name == STATISTICS:
            return dataclasses.asdict(self.statistics())
        raise LookupError(name)

    def records_of(self, caller: str | None) -> CallRecords | None:
        """Return the records of a client's calls; None if it has no name."""
        known = None if caller is None else self._callers.get(caller)
        # A name has its place with its first call: one that only connects takes none.
        if caller is None or known is not None or len(self._callers) >= _MOST_CALLERS:
            return known
        return self._callers.setdefault(caller, CallRecords(kept_times=0))
