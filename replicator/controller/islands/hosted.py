"""An island as its process has it: a `LocalIsland`, fed by messages of its controller.

    controller ── take (number, items) ──> inbox ──> the dispatching thread
    controller <── reports, all that there are ──── the threads that wait for results
    other islands <── shards, when computed ─────── a thread that sends

Messages are numbered. Handlers of `rpc` run in several threads, so a controller sends
the next one when this one was taken, and a number that is not the next is refused.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from replicator.base.host.clock import Clock
from replicator.controller.islands.exports import computation_from
from replicator.controller.islands.local import LocalIsland
from replicator.controller.islands.protocol import (
    Computation,
    IslandDevice,
    IslandMessage,
    Key,
    OrderList,
    ShardReceiver,
    process_name,
)
from replicator.controller.islands.running.host_run import forget_function
from replicator.controller.islands.waiting.arrivals import IslandValue, lost_value
from replicator.controller.islands.waiting.asked_reads import AskedReads
from replicator.controller.islands.waiting.outcome import Outcome
from replicator.controller.islands.wire import (
    Data,
    array_data,
    error_data,
    error_from,
    keys_from,
    layout_data,
    order_from,
    shards_data,
    shards_from,
    values_from,
)
from replicator.engine.run_ahead import MOST_ON_CPU
from replicator.errors import (
    ArgumentError,
    EncodeError,
    MessageTooLargeError,
    OpFailedError,
)
from replicator.rpc.client.client import Client, fail_fast

_MOST_ANSWER_BYTES = 1 << 20
"""Of a read that goes along with reports, whose lateness means that it is lost."""

_TOGETHER_S = 0.001
"""How long a report that nobody waits for may wait for others, to go in one message."""

_MOST_TOGETHER = MOST_ON_CPU // 2
"""With so many the island is about to have too little to do."""

_FLUSH_S = 10.0
"""How long an island that ends waits for what it sent to arrive."""

_UNSENDABLE = EncodeError, MessageTooLargeError


class PeerIsland:
    """Another island, to which shards are sent when they are computed.

    Args:
      client: Client of its process.
      session: Token of the controller's session.
    """

    def __init__(self, client: Client, session: str) -> None:
        self._client = client
        self._session = session
        # A thread waits while it reads an array; calls themselves do not wait.
        self._sending = ThreadPoolExecutor(1, "island-send")
        # Calls that are on their way; any thread may take one out.
        self._sent: set[Future[Any]] = set()

    def deliver(self, key: Key, sender: int | str, shards: IslandValue) -> None:
        """Send a value once it is computed, or the error that it ended with."""
        # A later op may be given its memory before it is read here.
        given = shards.array
        copies = {id(each): each.copy() for each in given or ()}
        kept = None if given is None else [copies[id(each)] for each in given]
        done = shards.done
        done.then(
            lambda: self._sending.submit(
                self._send, [*key, sender], kept, done.exception()
            )
        )

    def lose(self) -> None:
        """Wait for the other one no longer: it is gone."""
        fail_fast(self._client)

    def close(self) -> None:
        """Send nothing more, once what the other one may wait for has arrived."""
        self._sending.shutdown(wait=True)
        wait(list(self._sent), _FLUSH_S)
        self._client.close()

    def _send(
        self, what: Data, shards: Sequence[Any] | None, error: BaseException | None
    ) -> None:
        data = None if shards is None or error else shards_data(shards)
        try:
            self._call(what, data, error)
        except _UNSENDABLE as failure:
            self._call(what, None, OpFailedError(str(failure)))

    def _call(self, what: Data, data: Data, error: BaseException | None) -> None:
        sent = self._client.futures.deliver(
            self._session, *what, data, error_data(error)
        )
        self._sent.add(sent)
        sent.add_done_callback(lambda sent: self._arrived(sent, what))

    def _arrived(self, sent: "Future[Any]", what: Data) -> None:
        """Send an error in place of what cannot arrive: the other one waits for it.

        The controller hears of an island that is gone by itself.
        """
        self._sent.discard(sent)
        failure = None if sent.cancelled() else sent.exception()
        if isinstance(failure, _UNSENDABLE):
            self._call(what, None, OpFailedError(str(failure)))


class HostedIsland:
    """The island of one controller.

    Args:
      name: Its name there.
      devices: Its devices.
      peers: Addresses of the other islands, by name.
      session: Token of the controller's session.
      clock: Source of the time.
      connect: Returns a client of an address.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[IslandDevice],
        *,
        peers: Mapping[str, str],
        session: str,
        clock: Clock,
        connect: Callable[[str], Client],
    ) -> None:
        self.session = session
        self._clock = clock
        self._heard_s = clock.now_s()
        self._connect = connect
        self._peers: dict[str, PeerIsland] = {}
        self._everyone: dict[str, ShardReceiver] = {}
        self._island = LocalIsland(
            name,
            devices,
            report=self._report,
            peers=self._everyone,
            reports_chains=True,
        )
        self._everyone[process_name(name, self._island.process)] = self._island
        for peer, address in peers.items():
            self._take_peer(peer, address)
        self._computations: dict[int, Computation] = {}
        self._lists: dict[int, OrderList] = {}
        self._next = 0
        self._taking = threading.Lock()  # guards these three
        self._reports: list[Data] = []
        self._asked = AskedReads()
        self._answers: list[Data] = []
        # Whether to report soon, or at once.
        self._is_news = self._is_urgent = False
        self._is_closed = False
        # By run, the values that it keeps, and those that it has not reported.
        self._runs: dict[int, tuple[frozenset[int], set[int]]] = {}
        self._lock = threading.Lock()  # guards these seven
        self._news = threading.Condition(self._lock)

    @property
    def silent_s(self) -> float:
        """Seconds since the controller last asked for reports."""
        return self._clock.now_s() - self._heard_s

    @property
    def is_closed(self) -> bool:
        """Whether the controller has left."""
        return self._is_closed

    def load(
        self, number: int, data: dict[str, Any], run: Callable[..., Any], shapes: Data
    ) -> Data:
        """Compile a computation; return the layouts of its outputs."""
        computation = computation_from(data, run, shapes)
        layouts = self._island.load(computation)
        with self._taking:
            self._computations[number] = computation
        return [layout_data(layout) for layout in layouts]

    def take(self, number: int, items: Sequence[Data]) -> None:
        """Take the next message: runs, and what is forgotten.

        Raises:
          ArgumentError: It is not the next, or holds what a controller does not send.
        """
        with self._taking:
            if number != self._next:
                raise ArgumentError(
                    f"`number` must be the next of the sequence of {self._island.name},"
                    f" {self._next}, got {number} with {[each[:2] for each in items]}. "
                    "Send each message once, in order."
                )
            self._next += 1
            for kind, *rest in items:
                if kind not in _ITEMS:
                    raise ArgumentError(
                        f"`items` must be those of {sorted(_ITEMS)}, got {kind!r}. Use "
                        "the same version of replicator on both sides."
                    )
                _ITEMS[kind](self, *rest)

    def deliver(self, key: Key, sender: int | str, shards: Data, error: Data) -> None:
        """Take shards that another island sends, or a vote, or the error instead."""
        failure = error_from(error)
        if failure is not None:
            value = lost_value(failure)
        else:
            array = None if shards is None else shards_from(shards)
            value = IslandValue(array, Outcome().end())
        self._island.deliver(key, sender, value)

    def reports(self, wait_s: float) -> Data:
        """Return what was reported since the last call; wait if nothing was.

        Returns:
          Whether the island was closed; a list of run, values, error and how many
          seconds ago; and a list of keys and arrays, of reads that were asked for.
        """
        self._heard_s = self._clock.now_s()
        with self._lock:
            if self._news.wait_for(lambda: self._is_news or self._is_closed, wait_s):
                self._news.wait_for(lambda: self._is_urgent, _TOGETHER_S)
            self._is_news = self._is_urgent = False
            found, self._reports = self._reports, []
            answers, self._answers = self._answers, []
            is_closed = self._is_closed
        now_s = self._clock.now_s()
        reports = [[*each, now_s - at_s] for *each, at_s in found]
        return [is_closed, reports, [self._answer(*each) for each in answers]]

    def read(self, keys: Sequence[Key]) -> Data:
        """Return values that were reported."""
        return [array_data(array) for array in self._island.read(keys)]

    def close(self) -> None:
        """End after the messages so far."""
        self._island.close()
        for peer in self._peers.values():
            peer.close()
        with self._lock:
            self._is_closed = True
            self._tell(is_urgent=True)

    def give_up(self) -> None:
        """End an island whose controller is gone, or has to go; returns at once."""
        for name, peer in list(self._peers.items()):
            peer.lose()
            error = OpFailedError(f"the controller of {self._island.name} was lost")
            self._island.lose(name, error)
        threading.Thread(target=self.close, daemon=True).start()

    def _report(
        self,
        run: int,
        values: Sequence[int],
        error: BaseException | None,
        _: float = 0.0,
        /,
    ) -> None:
        with self._lock:
            about = [run, list(values), error_data(error), self._clock.now_s()]
            self._reports.append(about)
            kept, left = self._runs.get(run, (frozenset(values), set()))
            left.difference_update(values)
            if not left:
                self._runs.pop(run, None)
            # Others go along with the next. That a run ended is what later ones of
            # this island wait for, though nobody reads what it made.
            if error is None:
                self._add_answers(self._asked.computed(run, values))
            if error is not None or self._answers or not self._runs:
                self._tell(is_urgent=True)
            elif not left or not kept.isdisjoint(values):
                self._tell(is_urgent=len(self._reports) >= _MOST_TOGETHER)

    def _tell(self, *, is_urgent: bool) -> None:
        """Have reports sent, soon or at once; with the lock held."""
        if not self._is_news or (is_urgent and not self._is_urgent):
            self._is_news, self._is_urgent = True, is_urgent
            self._news.notify_all()

    def _add_answers(self, reads: Sequence[Sequence[Key]]) -> None:
        """Have values read that are there; who asked for large ones fetches them."""
        for keys in reads:
            with contextlib.suppress(KeyError):  # dropped: nobody reads it
                arrays = self._island.read(keys)
                if sum(array.nbytes for array in arrays) <= _MOST_ANSWER_BYTES:
                    self._answers.append((keys, arrays))

    def _answer(self, keys: Sequence[Key], arrays: Sequence[Any]) -> Data:
        """Return a read as data; without arrays if one was donated meanwhile."""
        try:
            return [keys, [array_data(array) for array in arrays]]
        except RuntimeError:  # of JAX: it was deleted
            return [[], []]

    def _take_orders(self, number: int, orders: Data) -> None:
        found = [order_from(each, self._computations) for each in orders]
        self._lists[number] = OrderList(orders=found)

    def _take_run(
        self, place: int, run: int, orders: int, inputs: Data, values: Data
    ) -> None:
        order_list = self._lists[orders]
        if order_list.outputs:  # it may send alone
            with self._lock:
                self._runs.setdefault(run, (order_list.kept, set(order_list.outputs)))
        message = IslandMessage(
            number=place,
            run=run,
            order_list=order_list,
            inputs=keys_from(inputs),
            values=values_from(values),
        )
        self._island.submit(message)

    def _take_ask(self, keys: Data) -> None:
        found = [(int(run), int(value)) for run, value in keys]
        with self._lock:
            missing = {key for key in found if not self._island.is_computed(key)}
            if missing:
                self._asked.ask(found, missing)
            else:
                self._add_answers([found])
                self._tell(is_urgent=True)

    def _take_peer(self, name: str, address: str) -> None:
        peer = PeerIsland(self._connect(str(address)), self.session)
        self._peers[str(name)] = self._everyone[str(name)] = peer

    def _take_drop(self, run: int, value: int) -> None:
        with self._lock:
            self._asked.forget((run, value))
        self._island.drop((run, value))

    def _take_lost(self, source: str, error: Data) -> None:
        failure = error_from(error)
        assert failure is not None
        for name, peer in self._peers.items():
            if name == source or name.startswith(f"{source}."):
                peer.lose()
        self._island.lose(source, failure)

    def _forget_orders(self, number: int) -> None:
        self._lists.pop(number, None)

    def _forget_computation(self, number: int) -> None:
        self._computations.pop(number, None)

    def _forget_function(self, token: str) -> None:
        forget_function(str(token))


_ITEMS: dict[str, Callable[..., None]] = {
    "orders": HostedIsland._take_orders,
    "run": HostedIsland._take_run,
    "ask": HostedIsland._take_ask,
    "drop": HostedIsland._take_drop,
    "lost": HostedIsland._take_lost,
    "peer": HostedIsland._take_peer,
    "forget_orders": HostedIsland._forget_orders,
    "forget_computation": HostedIsland._forget_computation,
    "forget_function": HostedIsland._forget_function,
}
