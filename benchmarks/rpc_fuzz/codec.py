"""Decode messages at random, in a process of its own: `python -m ... CASES SEED`.

The last line is one JSON object: how many cases failed, by how. A crash, or a case that
never ends, ends the process, and is its caller's to count.
"""

import collections
import faulthandler
import json
import random
import signal
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.rpc_fuzz.mutations import Mutations
from benchmarks.rpc_fuzz.values import REGISTRY, RandomValues, is_same
from replicator.base.types import PyTree
from replicator.errors import DecodeError, MessageTooLargeError
from replicator.rpc.codec.codec import Encoded, decode, encode
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.wire_format import in_one_piece

try:
    import resource
except ImportError:  # no Unix: there is no limit to set
    resource = None

LIMITS = MessageLimits(message_bytes=1 << 20, head_bytes=1 << 16, leaves=4096)
SLOW_S = 1.0
NEVER_S = 120
_ORIGINALS = 2000
_ADDRESS_SPACE_BYTES = 256 << 20  # more than the limits allow by far
# A byte may become an empty list (56) in a list (8); msgpack before 1.2 makes short
# lists as long as they claim to be (11 MB; see `head_bounds`).
_PEAK_PER_BYTE, _PEAK_BYTES = 64, 12 << 20
_TRACED_EVERY, _CHECKED_EVERY = 100, 4
_FORBIDDEN = ("import", "exec", "compile", "open", "os.", "subprocess.", "socket.")
_FORBIDDEN += ("ctypes.", "pickle.", "marshal.", "shutil.", "tempfile.", "cpython.run")


class Watch:
    """Audit hook: every import, file, process and evaluation of this process."""

    def __init__(self) -> None:
        self.is_armed = False
        self.heard: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple) -> None:
        if self.is_armed and event.startswith(_FORBIDDEN):
            self.heard.append(f"{event} {args[:1]!r:.80}")


class Cases:
    """Cases by the seed, and what became of them."""

    def __init__(self, seed: int) -> None:
        self.failed = collections.Counter({kind: 0 for kind in KINDS})
        self._rng = random.Random(seed)
        self._values = RandomValues(seed)
        values = [self._values.value() for _ in range(_ORIGINALS)]
        values += [jax.random.key(0), {"rng": jax.random.split(jax.random.key(1))}]
        values += [["push", [np.ones(n)], None, 60.0] for n in (0, 9, 900) * 20]
        values += [self._values.bare_call() for _ in range(60)]
        self._originals = [encode(value, registry=REGISTRY) for value in values]
        for original in self._originals:  # what is imported late, is imported now
            decode(original.head, in_one_piece(original.buffers), registry=REGISTRY)
        heads = [original.head for original in self._originals]
        self._mutations = Mutations(seed, heads)
        self._watch = Watch()

    def run(self, number: int) -> None:
        """Run one case."""
        if self._rng.random() < 0.05:
            is_bare = self._rng.random() < 0.1
            self._round_trip(
                self._values.bare_call() if is_bare else self._values.value()
            )
            return
        head, buffers = self._message()
        is_traced = number % _TRACED_EVERY == 0
        if is_traced:
            tracemalloc.start()
        started_s = time.thread_time()
        self._watch.is_armed = True
        value = self._decoded(head, buffers)
        self._watch.is_armed = False
        if time.thread_time() - started_s > SLOW_S:
            self._fail("hangs", head)
        if is_traced:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            size = len(head) + sum(map(len, buffers))
            if peak > _PEAK_BYTES + _PEAK_PER_BYTE * size:
                self._fail("allocations", head)
        if self._watch.heard:
            self._fail("imports", head, self._watch.heard)
            self._watch.heard.clear()
        if value is not _REFUSED and number % _CHECKED_EVERY == 0:
            self._round_trip(value)

    def _message(self) -> tuple[bytes, Sequence[memoryview]]:
        choice = self._rng.random()
        if choice < 0.2:
            return self._mutations.noise(), ()
        if choice < 0.4:
            return self._mutations.invented(), ()
        original: Encoded = self._rng.choice(self._originals)
        buffers = original.buffers
        if choice < 0.5:
            buffers = [memoryview(self._mutations.mutated(data)) for data in buffers]
        return self._mutations.mutated(original.head), buffers

    def _decoded(self, head: bytes, buffers: Sequence[memoryview]) -> PyTree:
        try:
            return decode(head, in_one_piece(buffers), registry=REGISTRY, limits=LIMITS)
        except (DecodeError, MessageTooLargeError) as error:
            if isinstance(error.__cause__, MemoryError):
                self._fail("allocations", head)
        except Exception as error:
            self._fail("crashes", head, error)
        return _REFUSED

    def _round_trip(self, value: PyTree) -> None:
        """Send what is a value, because we made it or decoding said so."""
        try:
            head, buffers, _ = encode(value, registry=REGISTRY)
            found = decode(head, in_one_piece(buffers), registry=REGISTRY)
        except Exception as error:
            self._fail("crashes", b"", error)
        else:
            if not is_same(value, found):
                self._fail("wrong", head)

    def _fail(self, kind: str, head: bytes, why: Any = "") -> None:
        self.failed[kind] += 1
        print(f"{kind}: {head.hex()[:4000]} {why!r:.500}")


KINDS = ("crashes", "hangs", "imports", "wrong", "allocations")
_REFUSED = object()


def limit_memory() -> None:
    """Let an allocation far above the limits fail, also one that is not touched."""
    statm = Path("/proc/self/statm")
    if resource is not None and statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE_BYTES, hard))


def main(cases: str, seed: str) -> None:
    all_cases = Cases(int(seed))
    limit_memory()
    # Says where it was, then dies. Not `dump_traceback_later`: its thread frees memory
    # as it starts, and to do so beside `tracemalloc.start` crashes CPython.
    faulthandler.register(signal.SIGALRM, chain=True)
    for number in range(int(cases)):
        if number % 1000 == 0:
            signal.alarm(NEVER_S)
        all_cases.run(number)
    signal.alarm(0)
    print(json.dumps(all_cases.failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
