"""Nodes of programs that lose some of them. Light to import: each worker does."""

import gc
import os
import signal
import threading
import time
from pathlib import Path

import replicator.launchpad_bridge as lp
from replicator.errors import RpcError
from replicator.rpc.protocols import MessageKind
from replicator.rpc.server.served_call import current_call
from replicator.rpc.transports.connect import connect
from tests.multiprocess.worker_nodes import tell

CALL_S = 60.0


class Learner:
    """Takes what actors insert, steps all the time, and remembers its longest pause."""

    def __init__(self):
        self._inserted = []
        self._lock = threading.Lock()
        self._version = 0
        self._pause_s = 0.0

    def parameters(self):
        return self._version

    def insert(self, actor, number):
        with self._lock:
            self._inserted.append((actor, number))
        return number

    def status(self):
        with self._lock:
            return self._version, self._pause_s, list(self._inserted)

    def threads(self):
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def hold(self, seconds):
        time.sleep(seconds)

    def hold_until_cancelled(self):
        current_call().wait_cancelled(CALL_S)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def memory_bytes(self):
        fields = Path("/proc/self/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def large(self, megabytes):
        import numpy as np

        return np.zeros(megabytes << 20, np.uint8)

    def fail(self, how):
        raise ERRORS[how]()

    def run(self):
        last_s = time.monotonic()
        while not lp.wait_for_stop(0.01):
            now_s = time.monotonic()
            self._pause_s = max(self._pause_s, now_s - last_s)
            last_s = now_s
            self._version += 1


def act(learner, folder, index):
    """Fetch parameters, insert; write down what was acknowledged, before going on."""
    actor = f"{index}-{os.getpid()}"
    tell(Path(folder) / f"actor-{index}", os.getpid())
    acked = os.open(Path(folder) / f"acked-{actor}", os.O_WRONLY | os.O_CREAT, 0o600)
    number = 0
    while not lp.wait_for_stop(0.002):
        assert learner.parameters() >= 0
        learner.insert(actor, number)
        os.write(acked, f"{number}\n".encode())
        number += 1


class Replay:
    """A table with the size that its program gives it; empty after each start."""

    def __init__(self, size, folder):
        self._size = size
        self._items = []
        self._lock = threading.Lock()
        tell(Path(folder) / "replay", os.getpid())

    def insert(self, item):
        with self._lock:
            self._items = [*self._items, item][-self._size :]

    def sample(self):
        with self._lock:
            return self._size, list(self._items)


def insert_always(replay, folder):
    """Insert, whoever may be dead; write down each way in which a call ended."""
    count, log = 0, os.open(Path(folder) / "inserts", os.O_WRONLY | os.O_CREAT, 0o600)
    while not lp.wait_for_stop(0.005):
        began_s = time.monotonic()
        try:
            replay.call("insert", [count], timeout_s=CALL_S)
            how = "ok"
        except RpcError as error:
            how = type(error).__name__
        os.write(log, f"{how} {time.monotonic() - began_s:.3f}\n".encode())
        count += 1


def fetch_always(learner, folder, name, rate):
    """Fetch parameters at a steady rate, if there is time; write down each."""
    tell(Path(folder) / name, os.getpid())
    log = os.open(Path(folder) / f"fetched-{name}", os.O_WRONLY | os.O_CREAT, 0o600)
    next_s = time.monotonic()
    while not lp.stop_event().is_set():
        learner.parameters()
        os.write(log, b"fetched\n")
        next_s += 1 / rate
        lp.wait_for_stop(max(0.0, next_s - time.monotonic()))


def fetch_large(learner, folder):
    """Ask for much at once, and be stopped meanwhile by somebody else."""
    tell(Path(folder) / "greedy", os.getpid())
    while not lp.wait_for_stop(0.01):
        for future in [learner.futures.large(4) for _ in range(8)]:
            future.result()


def hold(learner, folder):
    learner.parameters()  # it is connected
    tell(Path(folder) / "holder", os.getpid())
    learner.hold(0.3)
    lp.wait_for_stop()


def vanish_often(learner, count):
    """Call and be gone before the answer, as often as that."""
    learner.parameters()  # a mere connection does not wait until somebody listens
    for number in range(count):
        lost = connect(learner.address, timeout_s=CALL_S)
        body = ["hold_until_cancelled", None, None, CALL_S]
        lost.send(MessageKind.CALL, number, body, timeout_s=CALL_S)
        lost.close()
    return count


def hold_for_long(learner):
    learner.hold(1000.0)


def ask_to_die(learner):
    learner.parameters()
    learner.die()


class Custom(Exception):
    """Not registered: it arrives as what it refines."""


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def _caused():
    error = KeyError("outer")
    error.__cause__ = ValueError("inner")
    return error


ERRORS = {
    "builtin": lambda: ZeroDivisionError("by zero"),
    "custom": lambda: Custom("mine"),
    "speechless": Speechless,
    "huge": lambda: ValueError("x" * 10_000_000),
    "caused": _caused,
}


def ask_to_fail(learner, how):
    learner.fail(how)


def survive(learner):
    """Provoke every error; return what came, and whether the server lives."""
    found = {}
    for how in ERRORS:
        try:
            learner.fail(how)
        except RpcError as error:
            kinds = [cls.__name__ for cls in type(error).__mro__]
            found[how] = (
                kinds,
                len(str(error)),
                getattr(error, "remote_traceback", ""),
            )
    return found, learner.parameters() >= 0


class BrokenConstructor:
    def __init__(self):
        raise OSError("no such device")

    def anything(self):
        pass


def break_stop_handler():
    def handler():
        raise LookupError("broken handler")

    lp.register_stop_handler(handler)
    lp.stop()
    lp.wait_for_stop()
