"""Attack a live server through its socket, while a good client calls it.

The attacker knows the secret: strangers get no further than the handshake. Of each
connection it makes good frames, frames that lie with a right checksum, and at last one
with a wrong one, after which the server must hang up. It may answer what it likes, but
never hands on another value than was sent, and never makes the good client wait.
"""

import collections
import contextlib
import os
import random
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Sequence

from benchmarks.rpc.processes import started
from benchmarks.rpc_fuzz.mutations import Mutations
from benchmarks.rpc_fuzz.server import LIMITS, original_values
from benchmarks.rpc_fuzz.values import REGISTRY, is_same
from replicator.base.types import PyTree
from replicator.errors import RpcError
from replicator.rpc.client.client import Client
from replicator.rpc.codec.codec import encode
from replicator.rpc.protocols import MessageKind
from replicator.rpc.transports import frames
from replicator.rpc.transports.connect import connect

SLOW_S = 1.0
"""A good call may take so long: cores are shared with the attacker."""
_HUNG_S = 10.0
_MOST_FRAMES = 24
_STRANGERS_EVERY = 50
_GROWTH_BYTES = 64 << 20  # hundreds of messages; fragments of memory grow, too
_CALM_S = 10.0
_MOST_LEFT = 16  # threads of the server that wait for work, and what they wait by
_PAUSE_S = 0.01  # of the good client, which shares cores with the attack
_WHERE_BITS = (32, 64, 32, 32)


class Attacker:
    """Frames by the seed, and how many of each kind were sent."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        values = original_values(seed)
        self._good = [
            _frame(["deposit", [index, value], None, 10.0], index)
            for index, value in enumerate(values)
        ]
        self._takes = [
            encode(["take", [value], {"more": value}, 10.0], registry=REGISTRY).head
            for value in values
        ]
        self._mutations = Mutations(seed, self._takes)

    def burst(self) -> list[bytes]:
        """Return the frames of one connection, the last of which is corrupted."""
        count = self._rng.randrange(_MOST_FRAMES)
        return [*(self._whole() for _ in range(count)), self._corrupted()]

    def _whole(self) -> bytes:
        """Return a frame with a right checksum."""
        choice = self._rng.random()
        if choice < 0.2:
            return self._rng.choice(self._good)
        if choice < 0.25:  # the header lies, in a way that the checksum confirms
            lie = bytearray(self._rng.choice(self._good))
            lie[self._rng.randrange(4, frames.HEADER_BYTES)] ^= (
                1 << self._rng.randrange(8)
            )
            return bytes(lie[:-4]) + zlib.crc32(lie[:-4]).to_bytes(4, "little")
        head = self._mutations.mutated(self._rng.choice(self._takes))
        if choice < 0.4:
            head = self._rng.choice((self._mutations.noise, self._mutations.invented))()
        kind = MessageKind.CALL if choice < 0.9 else self._rng.randrange(256)
        body = [memoryview(self._rng.randbytes(100))] if choice < 0.5 else []
        return _framed(kind, self._rng.getrandbits(20), head, body)

    def _corrupted(self) -> bytes:
        """Return a frame that must not be read, or the beginning of one."""
        choice = self._rng.random()
        if choice < 0.1:
            return self._mutations.noise()
        if choice < 0.2:  # nothing was shared
            numbers = map(self._rng.getrandbits, _WHERE_BITS)
            return frames.frame_with_shared_body(
                MessageKind.CALL,
                0,
                self._rng.choice(self._takes),
                num_bytes=1 + self._rng.getrandbits(19),
                where=frames.Where(
                    *(number >> self._rng.randrange(64) for number in numbers)
                ),
            )
        return self._mutations.mutated(self._rng.choice(self._good))


class GoodClient:
    """Calls the server all the time, and notes what goes wrong."""

    def __init__(self, address: str, values: Sequence[PyTree]) -> None:
        self.failed: list[str] = []
        self.calls = 0
        self.slowest_s = 0.0
        self._client = Client(address, registry=REGISTRY, limits=LIMITS, timeout_s=10.0)
        self._values = values
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._call_until_over)

    def __enter__(self) -> "GoodClient":
        self._client.wait_for_ready()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._client.close()

    def report(self) -> dict[str, PyTree]:
        """Return what the server says of itself."""
        return self._client.report()

    def _call_until_over(self) -> None:
        while not self._is_over.wait(_PAUSE_S):
            value = self._values[self.calls % len(self._values)]
            started_s = time.monotonic()
            try:
                if not is_same(value, self._client.echo(value)):
                    self.failed.append(f"another value than {value!r:.200}")
            except RpcError as error:
                self.failed.append(f"{type(error).__name__}: {error}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - started_s)
            self.calls += 1


def fuzz_socket(num_frames: int, seed: int) -> dict[str, int]:
    """Send so many frames; return how many failures there were, by kind."""
    failed = collections.Counter()
    with started("benchmarks.rpc_fuzz.server", str(seed)) as server:
        address = server.read_line()
        with GoodClient(address, original_values(seed)) as good:
            before = good.report()
            failed["hangs"] += _attack(address, num_frames, seed)
            after = _calm_report(good, before)
        failed["disturbed"] += len(good.failed) + (good.slowest_s > SLOW_S)
        failed["crashes"] += server.process.poll() is not None
    for text in good.failed[:10]:
        print(f"disturbed: {text}")
    grown = after["memory_bytes"] - before["memory_bytes"]
    print(
        f"{num_frames} frames: {after['taken']} arrived as they were sent, "
        f"{good.calls} good calls, the slowest in {1e3 * good.slowest_s:.0f} ms; the "
        f"server grew by {grown / 1e6:.1f} MB"
    )
    failed["wrong"] += after["wrong"]
    failed["imports"] += len(after["modules"])
    failed["allocations"] += grown > _GROWTH_BYTES
    failed["leaks"] += _has_more(before, after)
    return dict(failed)


def _attack(address: str, num_frames: int, seed: int) -> int:
    """Return how often the server did not hang up."""
    attacker = Attacker(seed)
    hangs = sent = connections = 0
    while sent < num_frames:
        burst = attacker.burst()
        sent += len(burst)
        connections += 1
        is_stranger = connections % _STRANGERS_EVERY == 0
        with _stranger(address) if is_stranger else _member(address) as sock:
            hangs += not _is_hung_up(sock, b"".join(burst))
    return hangs


@contextlib.contextmanager
def _member(address: str) -> Iterator[socket.socket]:
    """Connect as a client that belongs to the program."""
    connection = connect(address, registry=REGISTRY, limits=LIMITS)
    try:
        descriptor = connection.fileno()
        assert descriptor is not None, "a Unix socket has one"
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            yield sock
    finally:
        connection.close()


@contextlib.contextmanager
def _stranger(address: str) -> Iterator[socket.socket]:
    """Connect without a handshake."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address.removeprefix("unix:"))
        yield sock


def _is_hung_up(sock: socket.socket, data: bytes) -> bool:
    """Send all that the server takes; tell whether it closes the connection."""
    sock.settimeout(_HUNG_S)
    is_hung_up = threading.Event()
    reader = threading.Thread(target=_drain, args=(sock, is_hung_up))
    reader.start()
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    except TimeoutError:
        return False
    except OSError:
        pass  # it hung up before it had read all
    finally:
        reader.join()
    return is_hung_up.is_set()


def _drain(sock: socket.socket, is_hung_up: threading.Event) -> None:
    """Read the server's answers until it hangs up, or says nothing for long."""
    with contextlib.suppress(TimeoutError):
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1 << 16):
                pass
        is_hung_up.set()


def _calm_report(good: GoodClient, before: dict[str, PyTree]) -> dict[str, PyTree]:
    """Return the server's report once it has let go of what the attack left."""
    ends_s = time.monotonic() + _CALM_S
    while True:
        after = good.report()
        if not _has_more(before, after) or time.monotonic() > ends_s:
            return after
        time.sleep(0.1)


def _has_more(before: dict[str, PyTree], after: dict[str, PyTree]) -> bool:
    """Return whether threads or descriptors are left over."""
    more = [after[name] - before[name] for name in ("threads", "descriptors")]
    return max(more) > _MOST_LEFT


def _frame(value: PyTree, call_id: int) -> bytes:
    head, buffers, _ = encode(value, registry=REGISTRY)
    return _framed(MessageKind.CALL, call_id, head, buffers)


def _framed(kind: int, call_id: int, head: bytes, buffers: list[memoryview]) -> bytes:
    if not buffers:
        return frames.frame_without_buffers(kind, call_id, head)
    layout = frames.lay_out(buffers)
    parts = frames.frame_with_buffers(kind, call_id, head, layout=layout)
    return b"".join(parts)
