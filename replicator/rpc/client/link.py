"""One connection of a client, and the calls that wait for an answer on it.

No thread reads for the client: a caller that waits for an answer reads, also for all
others (`reading_role`), so a call that is alone costs one send and one receive and
wakes no thread. While futures wait, a thread of the link reads: `background_reader`.

After a second without an answer the link sends a ping, which names the calls that wait;
the server replies which of them run, which wait, and which it does not know.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from replicator.base.types import PyTree
from replicator.errors import (
    CallTimeoutError,
    ConnectionLostError,
    EncodeError,
    MessageTooLargeError,
    RpcError,
)
from replicator.rpc.arrivals import checked
from replicator.rpc.client.reading_role import Inbox, ReadingRole
from replicator.rpc.client.retry import TryOutcome
from replicator.rpc.keepalive import Keepalive
from replicator.rpc.protocols import Connection, Message, MessageKind

_CALL = int(MessageKind.CALL)
_ANSWERS = (int(MessageKind.REPLY), int(MessageKind.ERROR))
_NOTIFY_TIMEOUT_S = 0.5


class Failure(NamedTuple):
    """A try that got no answer.

    Attributes:
      outcome: Reason, as far as it decides on another try.
      cause: Error of the transport.
      reported: State of the call in the server's last pong, and seconds.
      silent_s: Seconds since the server last gave a sign of life.
    """

    outcome: TryOutcome
    cause: Exception | None = None
    reported: tuple[str, float] | None = None
    silent_s: float = 0.0


Answer: TypeAlias = Message | Failure


class FutureReader(Protocol):
    """Reads while futures wait: a `BackgroundReader`, whose file imports this one."""

    is_asleep: bool

    def wake(self) -> None:
        """Start reading."""

    def close(self) -> None:
        """End the thread, as the link is lost."""


class WaitingCall(Protocol):
    """A call that waits for its answer.

    Attributes:
      call_id: Number of the call.
      is_sent: Whether it was sent whole; before, no server can know it.
      reported: State of the call in the server's last pong, and seconds.
      deadline_s: Time at which the link settles it as late; infinite if its caller
        watches the time itself.
    """

    call_id: int
    deadline_s: float
    is_sent: bool
    reported: tuple[str, float] | None

    def settle(self, answer: Answer) -> None:
        """Take the answer; called once, by the thread that reads."""


@dataclasses.dataclass(slots=True, eq=False)
class SyncCall:
    """A call whose caller waits in its own thread."""

    call_id: int
    is_sent: bool = False
    answer: Answer | None = None
    reported: tuple[str, float] | None = None
    inbox: Inbox = dataclasses.field(default_factory=Inbox)
    deadline_s: float = math.inf

    def is_answered(self) -> bool:
        """Return whether the answer is there."""
        return self.answer is not None

    def settle(self, answer: Answer) -> None:
        """Take the answer, and wake the caller."""
        self.answer = answer
        self.inbox.put(None)


class Link:
    """Connection to a server, and the calls that wait on it.

    Attributes:
      waiting: Calls that wait, by number; changed by atomic operations only.
      role: Right to read, held by one thread at a time.
      lost: Error with which the connection ended; None while it is open.
      is_leaving: Whether the server sent a goodbye.
      reader: Thread that reads while futures wait.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        heartbeat_s: float,
        on_gone: Callable[["Link"], None],
    ) -> None:
        """Take over a connection.

        Args:
          connection: Authenticated connection; `lose` closes it.
          heartbeat_s: Seconds without an answer after which the server is pinged.
          on_gone: Called when the link takes no more calls.
        """
        self.connection = connection
        self.waiting: dict[int, WaitingCall] = {}
        self.role = ReadingRole()
        self.lost: ConnectionLostError | None = None
        self.is_leaving = False
        self.reader: FutureReader | None = None
        self._heartbeat_s = heartbeat_s
        self._on_gone = on_gone
        self._try_take = self.role.try_take
        self._send = connection.send
        self._receive = connection.receive
        # Used by the holder of the role; others only read `silent_s` of it.
        self._signs = Keepalive(connection.peer, heartbeat_s=heartbeat_s)

    def ask(
        self, call_id: int, body: PyTree, timeout_s: float | None, deadline_s: float
    ) -> Answer:
        """Send a call and wait for its answer.

        Args:
          call_id: Number of the call.
          body: Value of its message.
          timeout_s: Seconds until the deadline; None: no deadline.
          deadline_s: Time of the deadline; infinite without one.

        Raises:
          EncodeError: The body cannot be sent.
          MessageTooLargeError: It is past the limit.
        """
        # The caller that is alone takes the role before it sends: nobody else may read
        # its answer. It is not in `waiting`, which spares an entry for each call.
        if self.waiting or not self._try_take(False):
            return self._ask_beside_others(call_id, body, timeout_s, deadline_s)
        is_sent = False
        patience_s = self._heartbeat_s
        if timeout_s is not None and timeout_s < patience_s:
            patience_s = timeout_s
        try:
            self._send(_CALL, call_id, body, timeout_s=timeout_s)
            is_sent = True
            # Mostly the answer itself. Another message, or none within a heartbeat,
            # makes this an ordinary waiting call.
            message = self._receive(timeout_s=patience_s)
            if message.call_id == call_id and message.kind in _ANSWERS:
                return message
            call = self._enter_sent(call_id, deadline_s, message)
        except CallTimeoutError as error:
            if not is_sent:
                return Failure(TryOutcome.LATE, error)
            call = self._enter_sent(call_id, deadline_s)
        except ConnectionLostError as error:
            self.lose(error)
            # Half a message is not a call: the server drops it with the connection.
            return Failure(TryOutcome.LOST if is_sent else TryOutcome.REFUSED, error)
        except (EncodeError, MessageTooLargeError):
            raise
        except BaseException:
            self._interrupted()
            raise
        finally:
            # Also after Ctrl-C: others may follow, and wait to be woken.
            self.role.leave()
        return self._wait(call, deadline_s)

    def start(
        self, call: WaitingCall, body: PyTree, *, timeout_s: float | None
    ) -> Failure | None:
        """Send a call that will be settled later; return why it was not sent.

        Raises:
          EncodeError: The body cannot be sent.
          MessageTooLargeError: It is past the limit.
        """
        # Before `lost` is looked at: `lose` sets that, then empties the table.
        self.waiting[call.call_id] = call
        try:
            if self.lost is not None:
                raise ConnectionLostError(str(self.lost))
            self.connection.send(_CALL, call.call_id, body, timeout_s=timeout_s)
        except ConnectionLostError as error:
            # The thread that takes a call out of the table is the one that settles it.
            is_unsettled = self.waiting.pop(call.call_id, None) is not None
            self.lose(error)
            return Failure(TryOutcome.REFUSED, error) if is_unsettled else None
        except CallTimeoutError as error:
            self.waiting.pop(call.call_id, None)
            return Failure(TryOutcome.LATE, error)
        except (EncodeError, MessageTooLargeError):
            self.waiting.pop(call.call_id, None)
            raise
        except BaseException:
            self.waiting.pop(call.call_id, None)
            self._interrupted()
            raise
        # After it was sent: a ping that names it earlier could find it unknown.
        call.is_sent = True
        return None

    def give_up(self, call: WaitingCall) -> bool:
        """Cancel a call, here and in the server; return whether it waited."""
        if self.waiting.pop(call.call_id, None) is None:
            return False
        self._notify(MessageKind.CANCEL, call.call_id)
        return True

    def expire_calls(self) -> None:
        """Settle the calls whose deadline has passed."""
        now_s = time.monotonic()
        # A copy: other threads add and remove calls meanwhile.
        for call in self.waiting.copy().values():
            if call.deadline_s <= now_s and self.give_up(call):
                call.settle(self.late(call))

    def late(self, call: WaitingCall, cause: Exception | None = None) -> Failure:
        """Return the failure of a call whose deadline has passed."""
        silent_s = self._signs.silent_s(time.monotonic())
        return Failure(TryOutcome.LATE, cause, call.reported, silent_s)

    def lose(self, error: ConnectionLostError) -> None:
        """Close the connection, and settle every call that waits as lost."""
        # A new one: the other's traceback leads back here, in a circle.
        # Before the table is emptied: `start` enters a call, then looks at `lost`.
        self.lost = self.lost or ConnectionLostError(str(error))
        self._on_gone(self)
        self.connection.close()
        # Several threads may come here at once; `popitem` gives each call to one.
        while self.waiting:
            try:
                _, call = self.waiting.popitem()
            except KeyError:
                break
            call.settle(Failure(TryOutcome.LOST, error))
        # Cut: link and reader refer to each other, and would outlive their use.
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()

    def leave_if_done(self) -> None:
        """Close the connection if the server is leaving and no call waits."""
        if self.is_leaving and not self.waiting:
            self.lose(ConnectionLostError(f"{self.connection.peer} sent a goodbye."))

    def read_until(self, is_done: Callable[[], bool], until_s: float) -> None:
        """Read until something is done, or late; the caller has the role."""
        while not is_done():
            left_s = until_s - time.monotonic()
            if left_s <= 0 or self.lost is not None:
                return
            self.read_one(min(left_s, self._heartbeat_s))

    def read_one(self, patience_s: float) -> None:
        """Deliver the next message; the caller has the role."""
        # No lock but the role is held here, so senders are never blocked by a reader.
        try:
            message = self.connection.receive(timeout_s=patience_s)
        except CallTimeoutError:
            pass
        except ConnectionLostError as error:
            self.lose(error)
        except BaseException:
            self._interrupted()
            raise
        else:
            self._signs.hear()
            self._deliver(message)
        if self._signs.is_due(now_s := time.monotonic()) and self.waiting:
            self._ping(now_s)

    def _ask_beside_others(
        self, call_id: int, body: PyTree, timeout_s: float | None, deadline_s: float
    ) -> Answer:
        """Send a call while others wait or send; wait with them."""
        call = SyncCall(call_id)
        failure = self.start(call, body, timeout_s=timeout_s)
        if failure is not None:
            return failure
        return self._wait(call, deadline_s)

    def _enter_sent(
        self, call_id: int, deadline_s: float, message: Message | None = None
    ) -> SyncCall:
        """Let a call that was alone wait like others; the caller has the role."""
        call = SyncCall(call_id, is_sent=True)
        self.waiting[call_id] = call
        self.role.own()
        if message is not None:
            self._deliver(message)
        elif (now_s := time.monotonic()) < deadline_s:
            self._ping(now_s)
        return call

    def _wait(self, call: SyncCall, deadline_s: float) -> Answer:
        """Wait until a call is answered or late; read while nobody else does."""
        try:
            # The role is not reentrant: without this the thread would follow itself.
            if self.role.is_mine():  # a callback of a future calls again
                self.read_until(call.is_answered, deadline_s)
            while call.answer is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                if not self._try_take(False):
                    self.role.follow(call.inbox, min(left_s, self._heartbeat_s))
                    continue
                try:
                    self.role.own()
                    self.read_until(call.is_answered, deadline_s)
                finally:
                    self.role.leave()
        finally:
            # This thread may have been woken to read, and leaves instead.
            self.role.pass_on()
            if call.answer is None:
                self.give_up(call)
        self.leave_if_done()
        return call.answer or self.late(call)

    def _deliver(self, message: Message) -> None:
        kind = message.kind
        if kind in _ANSWERS:
            # Atomic: of `give_up`, `lose` and this, one gets the call and settles it.
            call = self.waiting.pop(message.call_id, None)
            if call is not None:  # it was given up, or answered before
                call.settle(message)
        elif kind == MessageKind.PONG:
            self._take_pong(message)
        elif kind == MessageKind.GOODBYE:
            self.is_leaving = True
            self._on_gone(self)

    def _ping(self, now_s: float) -> None:
        """Ping the server, and ask for the state of the calls that it must know."""
        calls = self.waiting.copy().values()
        ping = self._signs.ping(now_s, [call.call_id for call in calls if call.is_sent])
        self._notify(MessageKind.PING, ping.number, ping.call_ids)

    def _take_pong(self, message: Message) -> None:
        """Note the state of calls; settle those that the server does not know."""
        try:
            states = checked(MessageKind.PONG, message.payload.take())
        except RpcError as error:
            self.lose(ConnectionLostError(f"{self.connection.peer}: bad pong: {error}"))
            return
        pong = self._signs.pong(message.call_id, states)
        for call_id, state in pong.states.items():
            call = self.waiting.get(call_id)
            if call is not None:
                call.reported = state
        for call_id in pong.unknown:
            call = self.waiting.pop(call_id, None)
            if call is not None:
                call.settle(Failure(TryOutcome.UNKNOWN))

    def _notify(self, kind: MessageKind, call_id: int, value: PyTree = None) -> None:
        try:
            self.connection.send(kind, call_id, value, timeout_s=_NOTIFY_TIMEOUT_S)
        except CallTimeoutError:
            pass  # it does not read: so much for a sign of life
        except ConnectionLostError as error:
            self.lose(error)

    def _interrupted(self) -> None:
        """Close the connection, which may be in the middle of a message."""
        self.lose(
            ConnectionLostError(f"A call to {self.connection.peer} was broken off.")
        )
