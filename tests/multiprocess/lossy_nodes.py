"""Nodes that call over connections which lose and repeat what passes, or break off."""

import collections
import threading

from replicator.errors import ConnectionLostError
from replicator.rpc.client.client import Client
from replicator.rpc.server.methods import idempotent
from tests.rpc.fakes import Faults, faulty

CALL_S = 240.0
_AT_ONCE = 250


class Ledger:
    """Remembers each effect of each call."""

    def __init__(self):
        self._entries = []
        self._lock = threading.Lock()

    @idempotent
    def enter(self, worker, number):
        return self._append(worker, number)

    def enter_at_most_once(self, worker, number):
        return self._append(worker, number)

    def entries(self):
        with self._lock:
            return list(self._entries)

    def _append(self, worker, number):
        with self._lock:
            self._entries.append((worker, number))
            return worker, number


def enter_all(ledger, worker, count, at_most_once, chances):
    """Enter `count` numbers; then some that may be lost; return what came of it."""
    faults = Faults(**chances, seed=worker)
    with Client(
        ledger.address,
        dial=faulty(ledger.address, faults, secret=None),
        heartbeat_s=0.02,
        timeout_s=CALL_S,
    ) as client:
        answers = entered(client.futures.enter, worker, range(count))
        more = range(count, count + at_most_once)
        ends = entered(client.futures.enter_at_most_once, worker, more)
    return {
        "wrong": [number for number, end in answers.items() if end != "answered"],
        "answered": [number for number, end in ends.items() if end == "answered"],
        "ends": dict(collections.Counter(ends.values())),
        "faults": faults.happened.total(),
    }


def entered(enter, worker, numbers):
    """Call for each number, many at once; return how each call ended."""
    ends = {}
    for begin in range(0, len(numbers), _AT_ONCE):
        futures = {
            number: enter(worker, number) for number in numbers[begin:][:_AT_ONCE]
        }
        for number, future in futures.items():
            try:
                answer = tuple(future.result(CALL_S))
                ends[number] = "answered" if answer == (worker, number) else "mixed up"
            except ConnectionLostError:
                ends[number] = "lost"
    return ends
