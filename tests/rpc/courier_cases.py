"""An object to call, and a server and a client for it over each transport."""

import contextlib
import threading
import time

from replicator.rpc.client.client import Client
from replicator.rpc.server import served_call
from replicator.rpc.server.methods import idempotent
from replicator.rpc.server.server import Server
from tests.rpc.transports.ends import SECRET, TRANSPORTS

LONG_S = 60.0
NAMES = list(TRANSPORTS)


class Probe:
    """Methods that tell the test what happens to them, and wait for it."""

    def __init__(self):
        self.running = 0
        self.most_running = 0
        self.runs = 0
        self.started = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.saw_cancelled = threading.Event()
        self.remaining_s = None
        self._lock = threading.Lock()

    def echo(self, value=None, **named):
        return named or value

    def noop(self):
        pass

    def hold(self, result=None):
        """Run until the test lets go."""
        self._enter()
        self.go_on.wait(LONG_S)
        self._leave()
        return result

    def until_cancelled(self):
        """Wait until nobody waits for it, then until the test lets go."""
        self._enter()
        call = served_call.current_call()
        self.remaining_s = call.remaining_s()
        if call.wait_cancelled(LONG_S):
            self.saw_cancelled.set()
        self.go_on.wait(LONG_S)
        self._leave()

    @idempotent
    def add_once(self):
        """Have an effect that can be counted."""
        with self._lock:
            self.runs += 1
            return self.runs

    @idempotent
    def hold_once(self):
        self._enter()
        self.go_on.wait(LONG_S)
        self._leave()
        return "once"

    def fail(self, text="bad"):
        raise ValueError(text)

    def unsendable(self):
        return {"a": [1, object()]}

    def _enter(self):
        with self._lock:
            self.runs += 1
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        self.started.release()

    def _leave(self):
        with self._lock:
            self.running -= 1


@contextlib.contextmanager
def serving(transport="in-process", instance=None, *, limits=None, **options):
    """Yield a server at one transport; handlers are let go at the end."""
    instance = instance or Probe()
    listener = TRANSPORTS[transport].listen(**(limits or {}))
    options = {"name": "probe"} | options
    if limits:
        options["limits"] = TRANSPORTS[transport].limits.__class__(**limits)
    with Server(instance, listeners=[listener], **options) as server:
        try:
            yield server
        finally:
            if isinstance(instance, Probe):
                instance.go_on.set()


def client_of(server, **options):
    return Client(server.address, **({"secret": SECRET, "timeout_s": LONG_S} | options))


@contextlib.contextmanager
def courier(transport="in-process", instance=None, *, client=None, **server):
    """Yield a client, and the object that it calls."""
    instance = instance or Probe()
    with (
        serving(transport, instance, **server) as started,
        client_of(started, **(client or {})) as calling,
    ):
        try:
            yield calling, instance
        finally:
            if isinstance(instance, Probe):
                instance.go_on.set()


def wait_until(condition, timeout_s=LONG_S):
    """Wait for the state of something that tells nobody when it changes."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.002)
