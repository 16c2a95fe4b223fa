"""Connections that lose, repeat and break off what passes."""

import collections
import random
import threading

from replicator.errors import CallTimeoutError, ConnectionLostError
from replicator.rpc.protocols import MessageKind
from replicator.rpc.transports.connect import connect
from tests.rpc.transports.ends import SECRET


class Faults:
    """What goes wrong, by the chance of each; `happened` counts what did.

    Each fault has draws of its own: how many of the first n happen does not depend on
    the order in which threads ask.
    """

    def __init__(self, *, lose=0.0, repeat=0.0, break_off=0.0, seed=0):
        self.is_silent = False
        self.happened = collections.Counter()
        self._chances = {"lose": lose, "repeat": repeat, "break_off": break_off}
        self._draws = {name: random.Random(f"{name} {seed}") for name in self._chances}
        self._lock = threading.Lock()

    def happens(self, name):
        with self._lock:
            happened = self._draws[name].random() < self._chances[name]
            self.happened[name] += happened
            return happened


class FaultyConnection:
    """Loses calls and replies, repeats replies, breaks off after calls."""

    def __init__(self, inner, faults):
        self.inner = inner
        self.faults = faults
        self.again = collections.deque()
        self.peer = inner.peer

    def send(self, kind, call_id, value, *, timeout_s):
        faults = self.faults
        if kind == MessageKind.CALL and not value[0].startswith("~"):
            if faults.happens("lose"):
                return 0
            num_bytes = self.inner.send(kind, call_id, value, timeout_s=timeout_s)
            if faults.happens("break_off"):
                self.inner.close()
            return num_bytes
        return self.inner.send(kind, call_id, value, timeout_s=timeout_s)

    def receive(self, *, timeout_s):
        if self.again:
            return self.again.popleft()
        message = self.inner.receive(timeout_s=timeout_s)
        faults = self.faults
        if faults.is_silent:
            raise CallTimeoutError("silence")
        if message.kind == MessageKind.REPLY and message.call_id:
            if faults.happens("lose"):
                raise CallTimeoutError("the reply was lost")
            if faults.happens("repeat"):
                self.again.append(message)
        return message

    def has_received(self):
        return bool(self.again) or self.inner.has_received()

    def fileno(self):
        return None

    def close(self):
        self.inner.close()


def faulty(address, faults, secret=SECRET):
    """Return what a client dials with."""
    return lambda left_s: FaultyConnection(
        connect(address, secret=secret, timeout_s=left_s), faults
    )


def nobody(left_s):
    """Dial where nobody is."""
    raise ConnectionLostError("Nobody listens.")
