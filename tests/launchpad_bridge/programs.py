"""Programs, and what their nodes run, that the tests of all launchers share.

They lie in a module, as a user's do: workers of other processes import it.
"""

import os
import signal
import sys
import threading
import time

import numpy as np

import replicator.launchpad_bridge as lp

# Long enough for a slow machine; nothing waits that long when all is well.
SOON_S = 60.0


class Counter:
    """Counts, and can be asked to do all that handlers do."""

    def __init__(self, start=0):
        self._total = start
        self._lock = threading.Lock()

    def add(self, number):
        with self._lock:
            self._total += number
            return self._total

    def double(self, array):
        return 2 * array

    def whoami(self):
        return lp.context.get_context().worker

    def stop_all(self):
        lp.stop()

    def is_stopping(self):
        return lp.stop_event().is_set()

    def fail(self, text):
        raise ValueError(text)


class Caller:
    """Calls its counter as its node's work, then stops the program."""

    def __init__(self, counter, *, do="add", args=(1,)):
        self._counter = counter
        self._do = do
        self._args = args

    def run(self):
        try:
            return getattr(self._counter, self._do)(*self._args)
        finally:
            lp.stop()


class Friend:
    """Knows another one, who knows it."""

    def __init__(self, friend, name):
        self._friend = friend
        self._name = name
        self._is_asked = threading.Event()

    def name(self):
        self._is_asked.set()
        return self._name

    def run(self):
        name = self._friend.name()
        while not self._is_asked.is_set() and not lp.wait_for_stop(0.02):
            pass  # the other one, which may have started much later, asks as well
        return name


class Impatient:
    """Calls another one in its constructor."""

    def __init__(self, other):
        other.anything()


class Tangled:
    """Answers by asking another one, which answers by asking this one."""

    def __init__(self, other, *, begins):
        self._other = other
        self._begins = begins

    def is_ready(self):
        return True

    def ask(self):
        return self._other.ask()

    def run(self):
        if self._begins:
            self._other.call("is_ready", timeout_s=SOON_S)
            self._other.ask()
        lp.wait_for_stop(SOON_S)


class Predictor:
    """Answers in batches."""

    def __init__(self, batch_size):
        self.predict = lp.batched_handler(batch_size, timeout=SOON_S)(self.predict)

    def predict(self, x):
        return x * len(x)


class Versions:
    """Gives another answer each time it is asked."""

    def __init__(self):
        self._count = 0

    def get(self, name):
        self._count += 1
        return f"{name}{self._count}"


def give(value):
    return value


def give_process():
    return os.getpid()


def fail(text="oh no"):
    raise ValueError(text)


def leave(code):
    sys.exit(code)


def wait_for_stop():
    return lp.wait_for_stop(SOON_S)


def be_preempted(starts):
    """Stop for a SIGTERM in the first starts; return which the next one is."""
    attempt = lp.context.get_context().attempt
    if attempt < starts:
        os.kill(os.getpid(), signal.SIGTERM)
        assert lp.wait_for_stop(SOON_S)
    return attempt


def wait_until(is_so, within_s=SOON_S):
    """Wait for something that no event tells of."""
    until_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until_s, "it did not come"
        threading.Event().wait(0.02)


def tell_process_and_wait(path):
    """Leave a file with the process's id; end with the program."""
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    lp.wait_for_stop(SOON_S)


def describe_context():
    context = lp.context.get_context()
    return [context.program, context.worker, context.launcher]


def stop_in_thread():
    thread = threading.Thread(target=lp.stop)
    thread.start()
    thread.join()
    return lp.wait_for_stop(SOON_S)


def handle_stop(path):
    """Leave a file when the program stops."""

    def note():
        with open(path, "w") as file:
            file.write("handled")

    lp.register_stop_handler(note)
    lp.wait_for_stop(SOON_S)


def fail_until(path, attempts):
    """Fail as often as that, whichever process counts."""
    with open(path, "a+") as file:
        file.write("x")
        file.seek(0)
        count = len(file.read())
    if count <= attempts:
        raise RuntimeError(f"attempt {count}")
    return count


def never_stop():
    while True:
        threading.Event().wait(0.05)


def sum_from(address, numbers):
    """Serve one sum on a port of its own, as a user's server would."""
    import socket

    host, port = address.resolve().split(":")
    with socket.create_server((host, int(port))) as server:
        server.settimeout(SOON_S)
        connection, _ = server.accept()
        with connection:
            connection.sendall(bytes([sum(numbers)]))


def read_from(address):
    import socket

    host, port = address.resolve().split(":")
    until_s = time.monotonic() + SOON_S
    while True:
        try:
            with socket.create_connection((host, int(port)), SOON_S) as connection:
                return connection.recv(1)[0]
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            lp.wait_for_stop(0.02)


def call_in_batch(predictor, count):
    futures = [predictor.futures.predict(np.float32(i)) for i in range(count)]
    answers = [float(future.result(SOON_S)) for future in futures]
    lp.stop()
    return answers


def ask_often(cacher, count):
    answers = [cacher.get("v") for _ in range(count)]
    lp.stop()
    return answers


def read_flag():
    from absl import flags

    if "lp_tried_there" not in flags.FLAGS:
        flags.DEFINE_integer("lp_tried_there", 0, "Set for one group.")
    return flags.FLAGS.lp_tried_there


def same_objects(first, second):
    return first is second


def program_of(*nodes, **labelled):
    """Return a program of nodes, by label; without one they are `node`."""
    program = lp.Program("tried")
    for node in nodes:
        program.add_node(node, label="node")
    for label, node in labelled.items():
        program.add_node(node, label=label)
    return program


def counter_and(**caller):
    """Return a program of a counter and a caller of it."""
    program = lp.Program("tried")
    counter = program.add_node(lp.CourierNode(Counter), label="counter")
    program.add_node(lp.CourierNode(Caller, counter, **caller), label="caller")
    return program
