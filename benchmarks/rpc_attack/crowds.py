"""Attacks by numbers and by size, before the proof: to keep others out, to be fed."""

import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

from benchmarks.rpc_attack.attack import (
    LONG_S,
    Won,
    forget_peak,
    hold,
    memory_bytes,
    within,
)
from benchmarks.rpc_attack.streams import Stream
from benchmarks.rpc_attack.target import Target, is_closed, read_message
from replicator.errors import ConnectionLostError
from replicator.rpc.security.authentication import ClientHandshake
from replicator.rpc.security.secret import Secret

_HALF_OPEN = 1000
_PATIENCE_S = 4.0
_STRANGERS = 16
_FLOOD_BYTES = 16 << 20
_GROWTH_BYTES = 64 << 20


def half_open_sockets(target: Target) -> None:
    """Keep a thousand connections to the Unix socket open, and say nothing."""
    with contextlib.ExitStack() as stack:

        def join() -> None:
            with contextlib.suppress(OSError):
                raw = stack.enter_context(socket.socket(socket.AF_UNIX))
                raw.settimeout(4 * LONG_S)
                raw.connect(target.path)

        with ThreadPoolExecutor(200) as pool:
            for _ in range(_HALF_OPEN):
                pool.submit(join)
            time.sleep(0.5)  # until there is no room for more
            _joins_in_time(target, target.unix)


def half_open_streams(target: Target) -> None:
    """The same with as many gRPC streams as there may be."""
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(Stream(target.port))
        _joins_in_time(target, target.grpc)
        _joins_in_time(target, target.unix)


def half_open_ports(target: Target) -> None:
    """Open TCP connections that never speak HTTP/2."""
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            with contextlib.suppress(OSError):
                place = ("127.0.0.1", target.port)
                stack.enter_context(socket.create_connection(place, LONG_S))
        _joins_in_time(target, target.grpc)


def _joins_in_time(target: Target, address: str) -> None:
    start_s = time.monotonic()
    with target.client(address, timeout_s=3 * LONG_S) as client:
        hold(client.echo(1) == 1, "it answers wrongly")
    took_s = time.monotonic() - start_s
    hold(took_s < _PATIENCE_S, f"a client at {address} waited {took_s:.1f} s")


def silence(target: Target) -> None:
    """Stop in the middle of the handshake, or drip it."""
    with target.raw() as raw, target.raw() as halfway, Stream(target.port) as stream:
        halfway.sendall(ClientHandshake(target.secret, binding="unix").hello())
        start_s = time.monotonic()
        hold(is_closed(raw) and stream.receive() == b"", "silence is borne for ever")
        read_message(halfway)
        hold(is_closed(halfway), "half a handshake is borne for ever")
        took_s = time.monotonic() - start_s
        hold(took_s < 2 * _PATIENCE_S, f"silence was borne for {took_s:.1f} s")
    with target.raw() as raw:
        hello = ClientHandshake(target.secret, binding="unix").hello()
        start_s = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in hello:
                raw.sendall(bytes([byte]))
                time.sleep(0.2)
                hold(time.monotonic() - start_s < 2 * _PATIENCE_S, "dripping is borne")


def _flood_socket(target: Target) -> None:
    handshake = ClientHandshake(Secret.generate(), binding="unix")
    with target.raw() as raw, contextlib.suppress(OSError):
        raw.sendall(handshake.hello())
        raw.sendall(handshake.answer(read_message(raw)))
        for _ in range(_FLOOD_BYTES >> 20):
            raw.sendall(bytes(1 << 20))


def _flood_stream(target: Target) -> None:
    handshake = ClientHandshake(Secret.generate(), binding=target.grpc_binding)
    with Stream(target.port) as stream:
        stream.send(handshake.hello())
        stream.send(handshake.answer(stream.receive()))
        for _ in range(_FLOOD_BYTES >> 20):
            stream.send(bytes(1 << 20))
        while stream.receive():
            pass


def _flood_stream_at_once(target: Target) -> None:
    with Stream(target.port) as stream:
        stream.send(bytes(_FLOOD_BYTES))
        while stream.receive():
            pass


def _bomb(target: Target) -> None:
    with Stream(target.port, compression=grpc.Compression.Gzip) as stream:
        stream.send(bytes(_FLOOD_BYTES))
        while stream.receive():
            pass


def _grows_little(target: Target, flood: Callable[[Target], None]) -> None:
    flood(target)
    before = memory_bytes(target.pid)
    forget_peak(target.pid)
    with ThreadPoolExecutor(_STRANGERS) as pool:
        for done in [pool.submit(flood, target) for _ in range(_STRANGERS)]:
            done.result()
    grown = memory_bytes(target.pid, "VmHWM") - before
    hold(grown < _GROWTH_BYTES, f"it grew by {grown >> 20} MiB")


def floods(target: Target) -> None:
    """Send megabytes in place of a proof, over each transport."""
    for flood in (_flood_socket, _flood_stream, _flood_stream_at_once):
        _grows_little(target, flood)


def bombs(target: Target) -> None:
    """Send what unfolds into megabytes."""
    _grows_little(target, _bomb)


def metadata(target: Target) -> None:
    """Send headers that are larger than any message."""
    with Stream(target.port, metadata=[("words", "x" * (1 << 20))]) as stream:
        stream.send(ClientHandshake(target.secret, binding=target.grpc_binding).hello())
        hold(stream.receive() == b"", "it reads them")


def no_descriptor_left(target: Target) -> None:
    """Take all descriptors: who comes then must be told, and served afterwards."""
    before, used = set[int](), _used(target)
    while before != used:  # clients of other attacks are leaving
        before, used = used, _used(target)
    first_free = next(number for number in range(1 << 16) if number not in used)
    _, hard = limits = resource.prlimit(target.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(target.pid, resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        target.member().close()
        raise Won("there was a descriptor left")
    except ConnectionLostError as told:
        hold("no file descriptor left" in str(told), f"it was told: {told}")
    finally:
        resource.prlimit(target.pid, resource.RLIMIT_NOFILE, limits)


def _used(target: Target) -> set[int]:
    time.sleep(0.2)
    return {int(name) for name in os.listdir(f"/proc/{target.pid}/fd")}


def many_clients(target: Target) -> None:
    """Have two hundred clients, where a process usually may open 1,024 files."""
    soft, _ = resource.prlimit(target.pid, resource.RLIMIT_NOFILE)
    hold(soft > 1024, f"the soft limit is {soft}")
    before = len(os.listdir(f"/proc/{target.pid}/fd"))
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.callback(target.member().close)
        used = len(os.listdir(f"/proc/{target.pid}/fd")) - before
        hold(used <= 2 * 200 + 8, f"200 clients take {used} descriptors")
    gone = within(
        LONG_S, lambda: len(os.listdir(f"/proc/{target.pid}/fd")) < before + 9
    )
    hold(gone, "what clients took is not given back")


ATTACKS: dict[str, Callable[[Target], None]] = {
    attack.__name__: attack
    for attack in (
        half_open_sockets,
        half_open_streams,
        half_open_ports,
        silence,
        floods,
        bombs,
        metadata,
        no_descriptor_left,
        many_clients,
    )
}
