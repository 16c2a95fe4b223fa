"""Be several clients that call a server in every way, for the soak to count errors.

`python -m benchmarks.rpc_soak.clients ADDRESS CLIENTS SEED` writes `ready`, and reads
orders, one a line: `go`, or `pause`. That it answers with one JSON object: turns,
errors, and the most frequent texts of errors. By then no client has a call under way,
and each has connected anew. Each client is a thread, with random turns of its own.
"""

import collections
import contextlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError

import numpy as np

from replicator.errors import CallTimeoutError
from replicator.rpc.client.client import Client

_TIMEOUT_S = 60.0
_TEXTS = 5
_SMALL = np.arange(256, dtype=np.float32)
_LARGE = np.arange(1 << 18, dtype=np.float32)


class Caller:
    """One client, and its turns; each raises if what it saw is not what must be."""

    def __init__(self, address: str, seed: int) -> None:
        self._address = address
        self._rng = random.Random(seed)
        self.client = Client(address, timeout_s=_TIMEOUT_S)
        turns: dict[Callable[[], None], int] = {
            self.call_noop: 40,
            self.echo_small: 20,
            self.echo_large: 5,
            self.push_large: 5,
            self.make_futures: 10,
            self.raise_there: 10,
            self.cancel: 4,
            self.let_time_out: 2,
            self.reconnect: 1,
        }
        self._turns, self._weights = list(turns), list(turns.values())

    def take_turn(self) -> None:
        """Do one thing or another."""
        (turn,) = self._rng.choices(self._turns, self._weights)
        turn()

    def call_noop(self) -> None:
        """Call what does nothing."""
        assert self.client.noop() is None

    def echo_small(self) -> None:
        """Get 1 KiB back as it was."""
        np.testing.assert_array_equal(self.client.echo(_SMALL), _SMALL)

    def echo_large(self) -> None:
        """Get 1 MiB back as it was."""
        assert np.array_equal(self.client.echo(_LARGE), _LARGE)

    def push_large(self) -> None:
        """Send 1 MiB."""
        assert self.client.push(_LARGE) is None

    def make_futures(self) -> None:
        """Have 16 calls in flight."""
        futures = [self.client.futures.echo(number) for number in range(16)]
        assert [future.result(_TIMEOUT_S) for future in futures] == list(range(16))

    def raise_there(self) -> None:
        """See the method's own error."""
        error = self.client.futures.fail("on purpose").exception(_TIMEOUT_S)
        assert isinstance(error, ValueError), error
        assert "on purpose" in str(error)

    def cancel(self) -> None:
        """Give a call up; it may have ended just before."""
        future = self.client.futures.wait(0.01)
        future.cancel()
        with contextlib.suppress(CancelledError):
            future.result(_TIMEOUT_S)

    def let_time_out(self) -> None:
        """See a deadline pass, if this thread is awake to see it."""
        started_s = time.monotonic()
        with contextlib.suppress(CallTimeoutError):
            self.client.call("wait", [0.1], timeout_s=0.02)
            assert time.monotonic() - started_s >= 0.1, "it waited less than it should"

    def reconnect(self) -> None:
        """Close the client; be a new one."""
        self.client.close()
        self.client = Client(self._address, timeout_s=_TIMEOUT_S)


class Crowd:
    """Threads that take turns, and stop for a pause."""

    def __init__(self, address: str, clients: int, seed: int) -> None:
        self._changed = threading.Condition()
        self._is_going = False
        self._busy = 0
        self.turns = 0
        self.errors: collections.Counter[str] = collections.Counter()
        self._callers = [Caller(address, 1000 * seed + n) for n in range(clients)]
        for caller in self._callers:
            caller.call_noop()
            threading.Thread(target=self._live, args=[caller], daemon=True).start()

    def go(self) -> None:
        """Let all go on."""
        with self._changed:
            self._is_going = True
            self._changed.notify_all()

    def pause(self) -> None:
        """Wait until nobody has a call under way; connect all anew."""
        with self._changed:
            self._is_going = False
            if not self._changed.wait_for(lambda: not self._busy, 2 * _TIMEOUT_S):
                self.errors[f"{self._busy} clients do not come back"] += 1
                return
        for caller in self._callers:
            caller.reconnect()
            caller.call_noop()

    def _live(self, caller: Caller) -> None:
        while True:
            with self._changed:
                # The end of the process ends a pause that nobody else does.
                self._changed.wait_for(lambda: self._is_going)
                self._busy += 1
            try:
                caller.take_turn()
                problem = None
            except BaseException as error:
                problem = f"{type(error).__name__}: {error}"[:500]
            with self._changed:
                self._busy -= 1
                self.turns += 1
                if problem is not None:
                    self.errors[problem] += 1
                if not self._busy:
                    self._changed.notify_all()


def main(address: str, clients: str, seed: str) -> None:
    crowd = Crowd(address, int(clients), int(seed))
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "go":
            crowd.go()
            continue
        crowd.pause()
        found = {
            "turns": crowd.turns,
            "errors": crowd.errors.total(),
            "texts": crowd.errors.most_common(_TEXTS),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
