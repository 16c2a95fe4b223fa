"""At most `size` handlers at once, over all connections; the rest wait their turn.

One connection, or few, cannot have all of a large pool: see `fair_queue`.

A slot is an item of the list `_free`. A thread that runs a handler holds one; taking
and giving back are single operations of the list, which are atomic. A call that waits
and a slot that is free cannot miss each other: the thread that adds either of the two
looks at the other afterwards, in `_dispatch`.
"""

import functools
import threading

from replicator.rpc.server.fair_queue import FairQueue
from replicator.rpc.server.served_call import Caller, ServedCall
from replicator.rpc.server.worker_threads import WorkerThreads

_RESERVED_OF = 16  # one slot in so many


class HandlerPool:
    """Slots, and the calls that wait for one."""

    def __init__(self, size: int, threads: WorkerThreads) -> None:
        self.size = size
        self._threads = threads
        self._free = [None] * size
        # Guards `_waiting`; `_free` needs no lock. `_dispatch` starts threads while it
        # is held, and so takes the lock of `WorkerThreads` under it, never the other
        # way round. No handler runs and nothing is sent under it.
        self._lock = threading.Lock()
        self._waiting: FairQueue[Caller, ServedCall] = FairQueue(
            max_seats=size, reserved=size // _RESERVED_OF
        )

    @property
    def num_running(self) -> int:
        """Return how many handlers run now."""
        return self.size - len(self._free)

    def leave_room_for(self, batch_size: int) -> None:
        """Let one client have as many slots as calls that run together need."""
        self._waiting.reserved = min(
            self._waiting.reserved, max(0, self.size - batch_size)
        )

    def waiting(self) -> list[ServedCall]:
        """Return the calls that wait now."""
        with self._lock:
            return list(self._waiting)

    def try_enter(self) -> bool:
        """Take a slot if one is free and no call waits for it.

        Not even where all that wait are of clients whose seats are taken: `submit`
        starts the call past them.
        """
        # Without the lock: a call that is put just now may be overtaken, no more.
        if self._waiting:
            return False
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def leave(self) -> None:
        """Give a slot back."""
        self._free.append(None)
        # Looked at after the slot is free: `submit` adds its call, then looks for one.
        if self._waiting:
            self._dispatch()

    def submit(self, call: ServedCall) -> None:
        """Let the connection of a call run it in a thread when a slot is free."""
        # In two steps: `_dispatch` takes the lock itself; others may be in it.
        with self._lock:
            self._waiting.put(call.caller, call)
        self._dispatch()

    def drop(self, caller: Caller) -> list[ServedCall]:
        """Take out the calls of a connection that wait; return them."""
        with self._lock:
            return self._waiting.drop(caller)

    def _dispatch(self) -> None:
        """Start calls that wait, as far as there are slots."""
        with self._lock:
            while self._waiting:
                try:
                    self._free.pop()
                except IndexError:
                    return
                taken = self._waiting.take(len(self._free) + 1)
                if taken is None:  # those that wait have all of their seats taken
                    self._free.append(None)
                    return
                # The slot and the seat go to the new task, which gives both back.
                try:
                    self._threads.run(functools.partial(self._run, taken[1]))
                except BaseException:  # the system gives no thread
                    self._free.append(None)
                    self._waiting.done(taken[1].caller)
                    raise

    def _run(self, call: ServedCall) -> None:
        try:
            call.caller.run(call)  # leaves the slot before it replies
        finally:
            # Not before the reply is sent: a client that does not read keeps its seats.
            with self._lock:
                self._waiting.done(call.caller)
            self._dispatch()
