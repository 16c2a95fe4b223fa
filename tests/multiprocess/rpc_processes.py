"""Servers and clients of the courier in processes of their own, for tests to end badly.

`python -m tests.multiprocess.rpc_processes serve unix:/path journal` serves, and writes
a line into the journal for each call of `add_once`; `call unix:/path method` calls.
"""

import contextlib
import ctypes
import os
import select
import subprocess
import sys
import threading
import time

from replicator.rpc.client.client import Client
from replicator.rpc.server.methods import idempotent
from replicator.rpc.server.server import Server

LONG_S = 60.0


class Target:
    """What the tests call."""

    def __init__(self, journal=""):
        self._journal = journal

    def pid(self):
        return os.getpid()

    def echo(self, value):
        return value

    def many_bytes(self, count):
        return bytes(count)

    def hold(self, seconds=LONG_S):
        time.sleep(seconds)
        return "held"

    def hold_the_interpreter(self, gate):
        """Let no other thread of this process run until a byte comes out of a pipe."""
        descriptor = os.open(gate, os.O_RDWR)
        ctypes.PyDLL(None).read(descriptor, ctypes.create_string_buffer(1), 1)
        os.close(descriptor)

    @idempotent
    def add_once(self, number, seconds=0.0):
        with open(self._journal, "a") as journal:
            journal.write(f"{number}\n")
        time.sleep(seconds)
        return number


@contextlib.contextmanager
def process(*arguments):
    """Yield a process of this module that has said that it is ready."""
    started = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.multiprocess.rpc_processes",
            *map(str, arguments),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        ready, _, _ = select.select([started.stdout], [], [], LONG_S)
        assert ready, "it did not start in time"
        assert started.stdout.readline() == "ready\n"
        yield started
    finally:
        started.kill()
        started.wait(LONG_S)
        started.stdin.close()
        started.stdout.close()


def serve(address, journal=""):
    with Server(Target(journal), name="target", address=address):
        print("ready", flush=True)
        sys.stdin.read()


def call(address, method):
    with Client(address) as client:
        threading.Thread(target=client.call, args=(method,), daemon=True).start()
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    {"serve": serve, "call": call}[sys.argv[1]](*sys.argv[2:])
