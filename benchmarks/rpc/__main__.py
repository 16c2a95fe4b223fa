"""Time calls to another process, with what they are compared with in the same run.

Ours runs as users have it: a server in a second process with a pool of threads, a
deadline on each call, codec and authentication on. The works of one group take turns,
a block of each, and a ratio is the median over rounds of the ratio within a round.

The first three of these have a core for each end, ours and their peers' alike, where
the system lets us (`latency` says why); `cores_apart` tells whether it did, and the
keys that end with `_unpinned` are the same without.

- Small calls against a ping of 16 bytes over a bare Unix socket; beside them ZeroMQ.
  The ping sleeps until it is answered, as programs do that are written in an hour; ours
  looks for the answer first (`adaptive_spin`), and so may be the quicker one.
- Echoes of arrays against echoes of the same bytes over a bare socket, buffers kept.
- Pushes of arrays against `np.copyto` of the array to warm memory. The receiver reads
  a byte of each page. Integers with the defaults, which copy them once more, and with
  `trusted_memory`; floats are used where they lie either way.
- Through gRPC against bare grpcio: its unary call, and its stream of 1 MiB chunks.
- An actor of Ray, where it is installed; else its two numbers are null.
- 40 times 32 MB from who has not the secret, and a gRPC peer that is stopped:
  `rpc_faults`.
"""

import collections
import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from benchmarks.cores import two_cores
from benchmarks.rpc import faults, peers
from benchmarks.rpc.latency import TIMEOUT_S, service, time_latencies
from benchmarks.rpc.processes import started
from benchmarks.rpc.works import Timed, Work, repeat, time_calls
from benchmarks.timing import estimate
from replicator.rpc.client.client import Client

_ROUNDS = flags.DEFINE_integer("rpc_rounds", 15, "Interleaved blocks of each work.")
_CALLS = flags.DEFINE_integer("rpc_calls", 1000, "Small calls in one block.")
_WINDOW_S = flags.DEFINE_float("rpc_window_s", 1.0, "Seconds that 16 clients call.")
_PROCESSES = flags.DEFINE_integer(
    "rpc_client_processes", 16, "Processes that the 16 clients share."
)
_FAULTS = flags.DEFINE_bool("rpc_faults", True, "Measure what attackers and stops do.")
_RAY = flags.DEFINE_bool("rpc_ray", True, "Measure Ray, if it is installed.")

CLIENTS = 16
FUTURES_IN_FLIGHT = 64
_MIB = 1 << 20

Numbers: TypeAlias = dict[str, float | None]
"""Measurements, by key; None where one is not possible here."""


def make_futures(client: Client) -> Callable[[int], None]:
    """Return what makes calls with so many in flight, each awaited in its turn."""

    def run(calls: int) -> None:
        waiting: collections.deque[Any] = collections.deque()
        for _ in range(calls):
            if len(waiting) == FUTURES_IN_FLIGHT:
                waiting.popleft().result(TIMEOUT_S)
            waiting.append(client.futures.noop())
        for future in waiting:
            future.result(TIMEOUT_S)

    return run


def time_grpc(client: Client, *, rounds: int, calls: int) -> Timed:
    """Time calls through gRPC, ours and bare."""
    array = np.ones(32 * _MIB // 4, np.float32)
    with peers.bare_grpc(array) as bare:
        works = {
            "bare grpcio no-op": Work(repeat(bare["noop"]), calls // 5 + 1),
            "rpc no-op, gRPC": Work(repeat(client.noop), calls // 5 + 1),
            "bare grpcio stream 32m": Work(repeat(bare["push"]), calls // 500 + 1),
            "rpc push 32m, gRPC": Work(
                repeat(lambda: client.push(array)), calls // 500 + 1
            ),
        }
        return time_calls(works, rounds=rounds)


def time_ray(client: Client, *, rounds: int, calls: int) -> Timed:
    """Time an actor of Ray and ours on the same host."""
    array = np.ones(32 * _MIB // 4, np.float32)
    with peers.ray_actor(array) as actor:
        works = {
            "Ray actor no-op": Work(repeat(actor["noop"]), calls // 10 + 1),
            "rpc no-op beside Ray": Work(repeat(client.noop), calls),
            "Ray actor push 32m": Work(repeat(actor["push"]), calls // 250 + 1),
            "rpc push 32m beside Ray": Work(
                repeat(lambda: client.push(array)), calls // 250 + 1
            ),
        }
        return time_calls(works, rounds=rounds)


def many_clients_per_s(
    address: str, *, processes: int, rounds: int, window_s: float
) -> float:
    """Return the calls a second of `CLIENTS` clients in so many processes."""
    share = str(CLIENTS // processes)
    with contextlib.ExitStack() as stack:
        callers = [
            stack.enter_context(started("benchmarks.rpc.caller", address, share))
            for _ in range(processes)
        ]
        for caller in callers:
            caller.read_line()
        rates = []
        for _ in range(rounds + 1):
            for caller in callers:
                caller.tell(str(window_s))
            rates.append(sum(float(caller.read_line()) for caller in callers))
    return estimate(rates[1:]).median


def measure_latency(folder: Path, *, rounds: int, calls: int) -> Numbers:
    """Measure single calls on one host, with a core for each end and without."""
    cores = two_cores()
    timed = time_latencies(folder / "latency", cores, rounds=rounds, calls=calls)
    show("each end on a core of its own" if cores else "ends anywhere", [timed])
    found = ratios_of(timed) | {
        "cores_apart": int(cores is not None),
        "raw_socket_us": timed.us("raw socket, 16 bytes"),
        "zeromq_us": timed.us("ZeroMQ, 16 bytes"),
    }
    if cores is None:
        return found | {f"{key}_unpinned": None for key in ratios_of(timed)}
    timed = time_latencies(
        folder / "unpinned", None, rounds=rounds // 3 + 1, calls=calls
    )
    show("ends wherever the system puts them", [timed])
    return found | {f"{key}_unpinned": n for key, n in ratios_of(timed).items()}


def ratios_of(timed: Timed) -> Numbers:
    """Compare the works of `latency`."""
    return {
        "noop_us": timed.us("rpc no-op"),
        "noop_ratio": timed.ratio("rpc no-op", "raw socket, 16 bytes"),
        "echo_1k_ratio": timed.ratio("rpc echo 1k", "raw socket echo 1k"),
        "echo_1m_ratio": timed.ratio("rpc echo 1m", "raw socket echo 1m"),
        "push_1m_ratio": timed.ratio("rpc push 1m", "np.copyto 1m"),
        "push_32m_ratio": timed.ratio("rpc push 32m", "np.copyto 32m"),
        "push_integers_ratio": timed.ratio("rpc push 32m of integers", "np.copyto 32m"),
        "push_integers_trusted_ratio": timed.ratio(
            "rpc push 32m of integers, trusted memory", "np.copyto 32m"
        ),
    }


def measure_host(folder: Path, *, rounds: int, calls: int) -> Numbers:
    """Measure what else happens on one host; show it."""
    with service(f"unix:{folder}/service") as child:
        address = child.read_line()
        with Client(address, timeout_s=TIMEOUT_S) as client:
            works = {"rpc futures": Work(make_futures(client), 2 * calls)}
            futures = time_calls(works, rounds=rounds)
            ray = None
            if _RAY.value and peers.is_installed("ray"):
                ray = time_ray(client, rounds=rounds, calls=calls)
        many_per_s = many_clients_per_s(
            address, processes=_PROCESSES.value, rounds=5, window_s=_WINDOW_S.value
        )
    show("one host", [futures, *([ray] if ray else [])])
    print(f"{CLIENTS} clients, {_PROCESSES.value} processes: {many_per_s:.0f} calls/s")
    if ray is None:
        print("Ray is not measured: it is not installed, or --norpc_ray.")
    return {
        "futures_per_s": 1e6 / futures.us("rpc futures"),
        "clients16_per_s": many_per_s,
        "ray_noop_speedup": ray
        and ray.ratio("Ray actor no-op", "rpc no-op beside Ray"),
        "ray_array_speedup": ray
        and ray.ratio("Ray actor push 32m", "rpc push 32m beside Ray"),
        "ray_us": ray and ray.us("Ray actor no-op"),
    }


def measure_grpc(*, rounds: int, calls: int) -> Numbers:
    """Measure what goes through gRPC; show it."""
    with (
        service("grpc://127.0.0.1:0") as child,
        Client(child.read_line(), timeout_s=TIMEOUT_S) as client,
    ):
        timed = time_grpc(client, rounds=rounds, calls=calls)
    show("gRPC", [timed])
    return {
        "grpc_noop_ratio": timed.ratio("rpc no-op, gRPC", "bare grpcio no-op"),
        "grpc_push_ratio": timed.ratio("bare grpcio stream 32m", "rpc push 32m, gRPC"),
        "bare_grpc_us": timed.us("bare grpcio no-op"),
    }


def show(title: str, groups: list[Timed]) -> None:
    """Print the works of each group, peers beside ours."""
    table = Table("work", "µs a call", "calls/s", title=title)
    for timed in groups:
        for name in timed.seconds:
            us = timed.us(name)
            table.add_row(name, f"{us:.1f}", f"{1e6 / us:.0f}")
        table.add_section()
    Console().print(table)


def main(argv: list[str]) -> None:
    del argv
    sizes = {"rounds": _ROUNDS.value, "calls": _CALLS.value}
    with tempfile.TemporaryDirectory() as name, faults.program_secret(Path(name)):
        result = measure_latency(Path(name), **sizes)
        result |= measure_host(Path(name), **sizes) | measure_grpc(**sizes)
        if _FAULTS.value:
            result |= faults.measure(Path(name))
    rounded = {
        key: None if value is None else round(value, 3) for key, value in result.items()
    }
    print(json.dumps(rounded))


if __name__ == "__main__":
    app.run(main)
