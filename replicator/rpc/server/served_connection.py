"""One client, seen from the server: read its calls, run them or let them wait.

Any thread may send; one at a time reads: here, in a thread of the connection, or in the
`selector_loop`, for all connections that it can watch.

    read a call ─┬─ quick: release the right to read, run it here, reply, take it back;
                 │         if another thread took it meanwhile (`read_handoff`), return
                 └─ else:  to the pool; read on

So a client that waits for each reply costs no switch of threads, and one whose call
turns out slow is read by another thread 2 ms later.
"""

import difflib
import logging
import threading
import time
from typing import Any

from replicator.base.types import PyTree
from replicator.errors import RpcError
from replicator.rpc.answers import ABANDONED, STOPPED, not_run, raised
from replicator.rpc.arrivals import checked
from replicator.rpc.protocols import Connection, Message, MessageKind, Payload
from replicator.rpc.remote_errors import ErrorInfo
from replicator.rpc.server.read_handoff import ReadingRight
from replicator.rpc.server.running import (
    REPLY_TIMEOUT_S,
    answer_unrun,
    run,
    run_if_wanted,
)
from replicator.rpc.server.served_call import ServedCall
from replicator.rpc.server.service import Service

_log = logging.getLogger(__name__)
_STOP_SEND_S = 0.2
_LOOK_S = 1.0
_CALL = int(MessageKind.CALL)


class ServedConnection:
    """One client of a server.

    Attributes:
      connection: Connection to the client.
      service: Server that it calls.
      calls: Calls from when they arrive until their reply was sent, by number.
      name: Name that the client gave; None if it gave none.
      is_stalled: Whether it has not taken a reply for a while: then its calls run in
        the pool, where they can hold up no more threads than that has places.
    """

    def __init__(self, service: Service, connection: Connection) -> None:
        self.connection = connection
        self.service = service
        # Changed by single atomic operations, in any thread; others look at copies.
        self.calls: dict[int, ServedCall] = {}
        self.name: str | None = None
        self.is_stalled = False
        # Of the selector loop: under its lock, and by its reading thread.
        self.descriptor = -1
        self.is_listed = False
        self.is_paused = False
        # Guards `_held_bytes`, `_held_calls` and changes of `is_paused`, `_is_closed`.
        # No other lock is taken and nothing is sent while it is held.
        self._lock = threading.Lock()
        self._held_bytes = 0
        self._held_calls = 0
        self._is_closed = False
        # Set when there is room, or at the end; only the reading thread clears it.
        self._room = threading.Event()

    def serve(self) -> None:
        """Read until the connection ends, in a thread of its own."""
        # Not kept: what refers to itself in a circle outlives its last use.
        ReadingRight(self.service.handoff, self.service.threads, self._read).start()

    def is_alone(self) -> bool:
        """Return whether the server has no other connection."""
        return len(self.service.connections) <= 1

    def run(self, call: ServedCall) -> None:
        """Run a call that waited, in this thread, which has a slot for it."""
        run_if_wanted(self.service, call)

    def handle(self, message: Message, received_s: float, reader: ReadingRight) -> None:
        """Release the right to read, and process a message."""
        kind, call_id, payload = message
        call = None
        # One that is sent twice is answered once. Known before it is read, as another
        # thread may then read a ping or a cancellation for it.
        if kind == _CALL and call_id not in self.calls:
            call = ServedCall(self, call_id, received_s, payload.num_bytes)
            self.calls[call_id] = call
        # From here on another thread may be in `handle` for the same connection.
        reader.lay_down(received_s)
        try:
            if call is not None:
                self._take(call, payload, reader)
            elif kind == MessageKind.CANCEL:
                self._cancel(call_id)
            elif kind == MessageKind.PING:
                self.send(
                    MessageKind.PONG,
                    self._states(checked(kind, payload.take())),
                    call_id=call_id,
                )
        except Exception:
            _log.exception("the connection with %s ends", self.connection.peer)
            self.close()

    def end(self, call: ServedCall) -> None:
        """Forget a call that was answered, or whose client is gone."""
        # Before `takes_calls` is looked at: `_stop` clears that, then counts calls.
        self.calls.pop(call.call_id, None)
        self.is_stalled = False
        if call.is_counted:
            self._give_room(call)
        if not self.service.takes_calls:
            self.service.call_ended.set()

    def send(
        self,
        kind: MessageKind,
        value: PyTree = None,
        *,
        call_id: int = 0,
        timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        """Send a message; disconnect a client that does not take it."""
        try:
            self.connection.send(kind, call_id, value, timeout_s=timeout_s)
        except RpcError:
            self.close()

    def close(self) -> None:
        """Disconnect, and give up the calls; drop those that have not started."""
        with self._lock:
            if self._is_closed:
                return
            # Before `calls` is read below: `_take` enters a call, then looks at this.
            self._is_closed = True
        self.service.connections.discard(self)
        if self.service.selector_loop is not None:
            self.service.selector_loop.remove(self)
        self.connection.close()
        # Outside of the lock: `end` takes it. What runs is cancelled, and ends itself.
        for call in self.service.pool.drop(self):
            self.end(call)
        for call in self.calls.copy().values():
            call.give_up()
        self._room.set()

    def send_goodbye(self) -> None:
        """Announce to the client that the server takes no more calls."""
        self.send(MessageKind.GOODBYE, timeout_s=_STOP_SEND_S)

    def give_up_calls(self) -> None:
        """Cancel the calls that run; refuse the calls that wait."""
        for call in self.service.pool.drop(self):
            answer_unrun(self.service, call, not_run(STOPPED))
        for call in self.calls.copy().values():
            call.give_up()

    def abandon_calls(self) -> list[ServedCall]:
        """Answer the calls that still run, and disconnect; return these calls."""
        # Their handlers run on: a thread cannot be ended. Their replies go nowhere.
        left = list(self.calls.copy().values())
        for call in left:
            answer = not_run(ABANDONED, time.monotonic() - call.received_s)
            self.send(
                MessageKind.ERROR,
                answer.value,
                call_id=call.call_id,
                timeout_s=_STOP_SEND_S,
            )
        self.close()
        return left

    def _read(self, reader: ReadingRight) -> None:
        """Read as the holder of the right, until that is lost, or the end."""
        receive = self.connection.receive
        connections = self.service.connections
        loop = (
            self.service.selector_loop if self.connection.fileno() is not None else None
        )
        try:
            while True:
                while self.is_paused and not self._is_closed:
                    self._room.wait(_LOOK_S)
                    self._room.clear()  # `is_paused` was cleared before it was set
                if loop is not None and len(connections) > 1:
                    # The loop may read it before this returns.
                    loop.add(self)
                    return
                message = receive(timeout_s=None)
                self.handle(message, time.monotonic(), reader)
                del message  # free its memory before the wait for the next one
                # Lost means that another thread reads on: the connection stays open.
                if not reader.take_up():
                    return
        except RpcError as error:
            _log.debug("%s: %s", self.connection.peer, error)
        self.close()

    def _take(self, call: ServedCall, payload: Payload, reader: ReadingRight) -> None:
        """Run a call, or let it wait for a thread, or answer with the reason."""
        service = self.service
        # Decoded here, after the right was released: a large message holds up nobody.
        try:
            name, args, kwargs, timeout_s = checked(_CALL, payload.take())[:4]
            target = service.methods.get(name)
            if timeout_s is not None:
                call.deadline_s = call.received_s + timeout_s
        except Exception as error:
            self._answer_unread(call, error)
            return
        if target is None:
            self._answer_own(call, name, args or ())
            return
        call.target = target
        call.args, call.kwargs = args or (), kwargs or {}
        del args, kwargs  # so that the call can let go of them before it replies
        # `close` sets this, then gives up all of `calls`, where this one is by now.
        if self._is_closed:
            call.give_up()
        # Looked at after the call is in `calls`, where `_drain` counts it.
        if not service.takes_calls:
            answer_unrun(service, call, not_run(STOPPED))
        elif target.is_quick and not self.is_stalled and service.pool.try_enter():
            # A slot is taken, which `run` gives back; `relieve` looks at `reader.call`.
            reader.call = call
            run(service, call, call.received_s)
            reader.call = None
        else:
            self._submit(call)

    def _submit(self, call: ServedCall) -> None:
        """Let a call wait for a thread; read no more while the client has too many."""
        # Counted before it is submitted: it may be over when `submit` returns.
        call.is_counted = True
        with self._lock:
            self._held_bytes += call.num_bytes
            self._held_calls += 1
            self.is_paused = self._is_full()
        # Outside of the lock: it may start a thread, and take the pool's lock.
        self.service.pool.submit(call)

    def _give_room(self, call: ServedCall) -> None:
        """Take a call out of the count; read on if that is what was waited for."""
        with self._lock:
            self._held_bytes -= call.num_bytes
            self._held_calls -= 1
            if not self.is_paused or self._is_full():
                return
            self.is_paused = False
        # Whichever reads it: a thread of its own waits for `_room`, the loop has
        # stopped watching it. The loop's lock is taken with none held.
        self._room.set()
        if self.service.selector_loop is not None and self.descriptor >= 0:
            self.service.selector_loop.resume(self)

    def _is_full(self) -> bool:
        limits = self.service.limits
        return (
            self._held_bytes > limits.in_flight_bytes
            or self._held_calls >= limits.in_flight_calls
        )

    def _cancel(self, call_id: int) -> None:
        # It may be over by now; then there is nothing to cancel.
        call = self.calls.get(call_id)
        if call is not None:
            call.give_up()

    def _states(self, call_ids: PyTree) -> list[tuple[int, str, float]]:
        """Return the state of each known call, and for how many seconds."""
        now_s = time.monotonic()
        states = []
        for call_id in call_ids or ():
            call = self.calls.get(call_id)
            if call is not None and call.started_s:
                states.append((call_id, "runs", now_s - call.started_s))
            elif call is not None:
                states.append((call_id, "waits", now_s - call.received_s))
        return states

    def _answer_own(self, call: ServedCall, name: str, args: Any) -> None:
        """Answer a built-in method, or a call of a method that does not exist."""
        try:
            value = self.service.answer(name, self, args)
        except LookupError:
            near = difflib.get_close_matches(name, self.service.methods, n=1)
            offered = ", ".join(sorted(self.service.methods))
            text = f"there is no method `{name}`; " + (
                f"did you mean `{near[0]}`?" if near else f"there are: {offered[:4096]}"
            )
            self._answer_unread(call, AttributeError(text))
        except Exception as error:
            self._answer_unread(call, error)
        else:
            self.calls.pop(call.call_id, None)
            self.send(MessageKind.REPLY, value, call_id=call.call_id)

    def _answer_unread(self, call: ServedCall, error: Exception) -> None:
        # Before it is answered: the client may use the number again at once.
        self.calls.pop(call.call_id, None)
        names = [cls.__name__ for cls in type(error).__mro__[:-2]]
        answer = raised(ErrorInfo(names, str(error)))
        self.send(MessageKind.ERROR, answer.value, call_id=call.call_id)
        self.service.count_refusal()
