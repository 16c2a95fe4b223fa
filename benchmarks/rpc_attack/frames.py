"""Attacks of a process of the program: by what it sends once it is in."""

import contextlib
import enum
import itertools
import pickle
import random
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rpc_attack import served
from benchmarks.rpc_attack.attack import (
    LONG_S,
    forget_peak,
    hold,
    memory_bytes,
    processor_s,
    within,
)
from benchmarks.rpc_attack.target import Target, private_folder
from replicator.errors import RpcError
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import Registry
from replicator.rpc.protocols import Message, MessageKind
from replicator.rpc.transports.connect import connect
from replicator.rpc.transports.frames import frame_without_buffers

_QUICK_S = 1.0
_GROWTH_BYTES = 128 << 20
_FLAGS = 2000
_FLIPS_S = 6.0


class _Trap:
    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (Path(self._path),)


def _answer(target: Target, value: Any, kind: int = MessageKind.CALL) -> Message | None:
    """Send a message and return what comes back; None: the connection ended."""
    with contextlib.closing(target.member()) as member:
        member.send(kind, 1, value, timeout_s=LONG_S)
        try:
            return member.receive(timeout_s=LONG_S)
        except RpcError:
            return None


def _refused(target: Target, call: list[Any], told: str) -> None:
    answer = _answer(target, call)
    hold(answer is None or answer.kind == MessageKind.ERROR, told)


def pickles(target: Target) -> None:
    """Send pickles, as messages of each kind and in place of arguments."""
    trap = private_folder() / "trap"
    for protocol in range(6):
        data = pickle.dumps(_Trap(trap), protocol)
        with contextlib.closing(target.member()) as member:
            for number, kind in enumerate([*MessageKind, 0, 129, 255]):
                frame = frame_without_buffers(kind, number, data)
                with contextlib.suppress(OSError):
                    member._socket.sendall(frame)  # type: ignore[attr-defined]
        _answer(target, ["echo", [data], None, None])
        _answer(target, [f"echo\n{data!r}", None, None, None])
    hold(not trap.exists(), "a pickle was executed")


def lying_frames(target: Target) -> None:
    """Announce more bytes than are sent, or bytes where there are none."""
    true = bytearray(frame_without_buffers(MessageKind.CALL, 1, b"\xc0"))
    forget_peak(target.pid)
    before = memory_bytes(target.pid)
    for place, form in ((16, "<I"), (20, "<Q")):
        for lie in (1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1):
            lied = bytearray(true)
            struct.pack_into(form, lied, place, lie % (1 << 8 * struct.calcsize(form)))
            _ends(target, bytes(lied))
    for place in range(len(true)):
        changed = bytearray(true)
        changed[place] ^= 0x41
        _ends(target, bytes(changed))
    grown = memory_bytes(target.pid, "VmHWM") - before
    hold(grown < _GROWTH_BYTES, f"a header that lies took {grown >> 20} MiB")


def _ends(target: Target, frame: bytes) -> None:
    with contextlib.closing(target.member()) as member, contextlib.suppress(OSError):
        member._socket.sendall(frame)  # type: ignore[attr-defined]


def lying_values(target: Target) -> None:
    """Announce more items, bytes or dimensions in a head than there are."""
    heads = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
    heads += [b"\x91" * 100_000, b"\xc9\xff\xff\xff\xff\x01", b"\xc1" + b"\xff" * 40]
    forget_peak(target.pid)
    before = memory_bytes(target.pid)
    for head in heads:
        _ends(target, frame_without_buffers(MessageKind.CALL, 1, head))
    grown = memory_bytes(target.pid, "VmHWM") - before
    hold(grown < _GROWTH_BYTES, f"a value that lies took {grown >> 20} MiB")


def attribute_paths(target: Target) -> None:
    """Call what is not declared."""
    for name in (
        *("_hidden", "__class__", "__init__", "__reduce__", "opened", "secret_word"),
        *("echo.__globals__", "echo.__func__", "_table.tofile", "", "~", "~stop"),
        *("__dict__", "echo ", "ECHO", "echo\0", "os.system", "builtins.eval"),
    ):
        _refused(target, [name, None, None, None], f"`{name}` was called")
    hold(b"a property was evaluated" not in target.log(), "a property was evaluated")


def unknown_classes(target: Target) -> None:
    """Send an instance of a class that the server does not know."""
    registry = Registry()
    registry.register(enum.Enum("Path", {"a": 1}))
    link = connect(
        target.unix, secret=target.secret, registry=registry, timeout_s=LONG_S
    )
    with contextlib.closing(link):
        value = next(iter(registry._by_class))(1)
        link.send(MessageKind.CALL, 1, ["echo", [value], None, None], timeout_s=LONG_S)
        try:
            hold(
                link.receive(timeout_s=LONG_S).kind == MessageKind.ERROR, "it made one"
            )
        except RpcError:
            return


def a_range_of_arguments(target: Target) -> None:
    """Make twenty million arguments of a few bytes."""
    forget_peak(target.pid)
    before = memory_bytes(target.pid)
    _refused(target, ["count", range(20_000_000), None, None], "it took them")
    grown = memory_bytes(target.pid, "VmHWM") - before
    hold(grown < _GROWTH_BYTES, f"they took {grown >> 20} MiB")


def arguments_of_other_kinds(target: Target) -> None:
    """Send as arguments what are none."""
    for args in (5, "ab", b"ab", {"a": 1}, {1, 2}, np.arange(3), 1.5, slice(3)):
        _refused(target, ["count", args, None, None], f"{type(args)} are arguments")
    for kwargs in ({1: 2}, {b"a": 1}, [("a", 1)], "ab", 5, {None: 1}):
        _refused(target, ["count", None, kwargs, None], f"{kwargs!r} are named ones")
    for name in (5, None, b"echo", ["echo"], 1.5, ("echo",), np.arange(2)):
        _refused(target, [name, None, None, None], f"{name!r} is a name")
    for body in (5, None, [], ["echo"], "echo", {"echo": 1}, np.arange(4)):
        _answer(target, body)


def timeouts_of_other_kinds(target: Target) -> None:
    """Send times that are none: they must take no place of the pool for ever."""
    times = (1j, "soon", float("nan"), -1.0, [1], {"a": 1}, np.ones(3), b"1")
    for timeout_s in times:
        with contextlib.closing(target.member()) as member:
            with contextlib.suppress(RpcError):
                for number in range(20):  # more than there are places
                    call = ["echo", [1], None, timeout_s]
                    member.send(MessageKind.CALL, number, call, timeout_s=LONG_S)
                for _ in range(20):
                    member.receive(timeout_s=1.0)
            told = f"after calls with {timeout_s!r} no place is left"
            hold(_serves(target), told)


def _serves(target: Target) -> bool:
    with contextlib.suppress(RpcError), target.client(timeout_s=3.0) as client:
        return client.echo(1) == 1
    return False


def a_long_name(target: Target) -> None:
    """Ask for a method whose name has as many letters as may be sent."""
    before_s = processor_s(target.pid)
    for letter in "ae":
        name = letter * (MessageLimits().head_bytes - 1000)
        _refused(target, [name, None, None, None], "it has it")
    took_s = processor_s(target.pid) - before_s
    hold(took_s < _QUICK_S, f"two names took {took_s:.1f} s of a processor")


def strange_words(target: Target) -> None:
    """Send hellos, pings and cancellations of nonsense."""
    nonsense = (None, 5, 1j, "x" * 100_000, {"a": 1}, [None] * 10, range(10**7))
    for value in nonsense:
        for kind in (
            MessageKind.PING,
            MessageKind.PONG,
            MessageKind.CANCEL,
            MessageKind.GOODBYE,
            MessageKind.REPLY,
        ):
            with contextlib.closing(target.member()) as member:
                member.send(kind, 1, value, timeout_s=LONG_S)
        for method in ("~hello", "~methods", "~statistics"):
            _answer(target, [method, [value] * 3, None, None])
            _answer(target, [method, value, None, None])


def flags_that_grow(target: Target) -> None:
    """Have an enum of flags make a member for each number that is sent."""
    registry = Registry()
    flags = enum.IntFlag("Rights", {"READ": 1, "WRITE": 2})
    registry.register(flags)
    with target.client() as client:
        before = client.members()
        link = connect(
            target.unix, secret=target.secret, registry=registry, timeout_s=LONG_S
        )
        with contextlib.closing(link):
            for number in range(_FLAGS):
                value = flags((number + 1) << 3)
                call = ["echo", [value], None, None]
                link.send(MessageKind.CALL, number, call, timeout_s=LONG_S)
                with contextlib.suppress(RpcError):
                    link.receive(timeout_s=LONG_S)
        grown = client.members() - before
    hold(grown < 16, f"the enum has {grown} more members")


def an_index_that_changes(target: Target) -> None:
    """Change an array of places in shared memory while the server writes to them.

    NumPy looks at all places first and writes then; what is good in the first pass and
    bad in the second one is an address of the attacker's.
    """
    good = np.arange(1 << 22) % served.TABLE
    until_s = time.monotonic() + _FLIPS_S
    over = threading.Event()
    places: list[np.ndarray] = []

    def flip() -> None:
        while not over.wait(random.uniform(0, 0.006)):
            for place in places:
                place[-1000:] = 1 << 40
            time.sleep(random.uniform(0, 0.006))
            for place in places:
                place[-1000:] = good[-1000:]

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        with contextlib.closing(target.member()) as member:
            for number in itertools.count(1):
                call = ["put", [good], None, None]
                member.send(MessageKind.CALL, number, call, timeout_s=LONG_S)
                places = _shared_places(member, len(good))
                hold(places, "no shared memory was used")
                member.receive(timeout_s=LONG_S)
                if time.monotonic() > until_s:
                    break
    except RpcError:
        within(LONG_S, lambda: target.process.poll() is not None)
    finally:
        over.set()
        thread.join()
    code = target.process.poll()
    hold(code is None, f"memory was overwritten: it ended with {code}")


def _shared_places(member: Any, length: int) -> list[np.ndarray]:
    """Return what this process shares with a server, to write to."""
    segments = member._shared._outgoing._segments.values()
    wide = [np.frombuffer(segment.memory, np.int64) for segment in segments]
    return [memory[:length] for memory in wide if len(memory) >= length]


def arrays_overwritten(target: Target) -> None:
    """Have arrays that a server keeps be overwritten by those that come after."""
    for address in target.addresses:
        without = MessageLimits(shared_bytes=0)
        for limits in (MessageLimits(), without):
            with target.client(address, limits=limits) as client:
                for number in range(12):
                    client.keep(np.full(1 << 17, float(number)))
                found = client.sums_of_kept()
            expected = [float(number << 17) for number in range(12)]
            hold(found == expected, f"kept arrays have changed: {found}")


def flood_of_calls(target: Target) -> None:
    """Call without end, and read no answer; others must be served meanwhile."""
    over = threading.Event()
    before = memory_bytes(target.pid)

    def flood() -> None:
        with contextlib.suppress(RpcError), contextlib.closing(target.member()) as link:
            number = 0
            while not over.is_set():
                number += 1
                call = ["echo", ["x" * 4000], None, None]
                link.send(MessageKind.CALL, number, call, timeout_s=1.0)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for _ in range(20):
            start_s = time.monotonic()
            with target.client() as client:
                client.echo(1)
            took_s = time.monotonic() - start_s
            hold(took_s < LONG_S / 3, f"another's call took {took_s:.1f} s")
    finally:
        over.set()
        thread.join()
    grown = memory_bytes(target.pid) - before
    hold(grown < 2 * _GROWTH_BYTES, f"what nobody reads took {grown >> 20} MiB")


def deep_and_many(target: Target) -> None:
    """Send values that are deeper, and hold more arrays, than limits allow."""
    limits = MessageLimits(depth=10_000, leaves=1 << 20, head_bytes=1 << 28)
    many = [np.zeros(0)] * (MessageLimits().leaves + 10)
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    for value in (many, deep):
        link = connect(
            target.unix, secret=target.secret, limits=limits, timeout_s=LONG_S
        )
        with contextlib.closing(link):
            try:
                call = ["echo", [value], None, None]
                link.send(MessageKind.CALL, 1, call, timeout_s=LONG_S)
                kind = link.receive(timeout_s=LONG_S).kind
            except RpcError:
                continue
            hold(kind == MessageKind.ERROR, "it was taken past the limit")


ATTACKS: dict[str, Callable[[Target], None]] = {
    attack.__name__: attack
    for attack in (
        pickles,
        lying_frames,
        lying_values,
        attribute_paths,
        unknown_classes,
        a_range_of_arguments,
        arguments_of_other_kinds,
        timeouts_of_other_kinds,
        a_long_name,
        strange_words,
        flags_that_grow,
        an_index_that_changes,
        arrays_overwritten,
        flood_of_calls,
        deep_and_many,
    )
}
