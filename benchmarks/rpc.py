"""Time calls to another process, with what they are compared with in the same run.

Ours runs as users have it: a server in a second process with a pool of threads, a
deadline on each call, codec and authentication on. The works of one group take turns,
a block of each, and a ratio is the median over rounds of the ratio within a round.

- Small calls against a ping of 16 bytes over a bare Unix socket; beside them ZeroMQ.
- Echoes of arrays against echoes of the same bytes over a bare socket, buffers kept.
- Pushes of arrays against `np.copyto` of the array to warm memory. The receiver reads
  a byte of each page.
- Through gRPC against bare grpcio: its unary call, and its stream of 1 MiB chunks.
- An actor of Ray, where it is installed; else its two numbers are null.
- 40 times 32 MB from who has not the secret, and a gRPC peer that is stopped:
  `rpc_faults`.
"""

import collections
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from benchmarks import rpc_faults, rpc_peers
from benchmarks.rpc_processes import Child, started
from benchmarks.timing import estimate, ratio, time_rounds
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
POOL_SIZE = 4
TIMEOUT_S = 60.0
_KIB, _MIB = 1 << 10, 1 << 20

Numbers: TypeAlias = dict[str, float | None]
"""What was measured, by key; None: it cannot be, here."""


class Work(NamedTuple):
    """Something to time: `run(calls)`."""

    run: Callable[[int], None]
    calls: int


class Timed(NamedTuple):
    """The seconds of one call, for each round."""

    seconds: Mapping[str, Sequence[float]]

    def us(self, name: str) -> float:
        """Return the median, in microseconds."""
        return 1e6 * estimate(self.seconds[name]).median

    def ratio(self, name: str, other: str) -> float:
        """Return how many times as long a call of `name` takes."""
        return ratio(self.seconds[name], self.seconds[other]).median


def repeat(call: rpc_peers.Call) -> Callable[[int], None]:
    """Return what makes so many calls, one after the other."""

    def run(calls: int) -> None:
        for _ in range(calls):
            call()

    return run


def time_calls(works: Mapping[str, Work], *, rounds: int) -> Timed:
    """Time works in turn, after warming up."""
    blocks = {name: _block(work) for name, work in works.items()}
    times_s = time_rounds(blocks, rounds=rounds)
    return Timed(
        {
            name: [block_s / work.calls for block_s in times_s[name]]
            for name, work in works.items()
        }
    )


def _block(work: Work) -> Callable[[], None]:
    return lambda: work.run(work.calls)


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


@contextlib.contextmanager
def service(*addresses: str, pool_size: int = POOL_SIZE) -> Iterator[Child]:
    """Serve in a second process; the first line it writes is the address."""
    arguments = ",".join(addresses), str(pool_size)
    with started("benchmarks.rpc_service", *arguments) as child:
        yield child


def time_small(client: Client, folder: Path, *, rounds: int, calls: int) -> Timed:
    """Time calls that carry nothing, one at a time and many in flight."""
    with (
        rpc_peers.raw_echoes(folder, {"ping": 16}) as raw,
        rpc_peers.zeromq_ping(folder) as zeromq,
    ):
        works = {
            "raw socket, 16 bytes": Work(repeat(raw["ping"]), 2 * calls),
            "rpc no-op": Work(repeat(client.noop), calls),
            "ZeroMQ, 16 bytes": Work(repeat(zeromq), calls // 2 + 1),
            "rpc futures": Work(make_futures(client), 2 * calls),
        }
        return time_calls(works, rounds=rounds)


def time_echoes(client: Client, folder: Path, *, rounds: int, calls: int) -> Timed:
    """Time arrays that come back, against their bytes alone."""
    sizes = {"1k": _KIB, "1m": _MIB}
    arrays = {name: np.ones(size // 4, np.float32) for name, size in sizes.items()}
    with rpc_peers.raw_echoes(folder, sizes) as raw:
        works = {}
        for name, count in (("1k", calls), ("1m", calls // 20 + 1)):
            works[f"raw socket echo {name}"] = Work(repeat(raw[name]), count)
            works[f"rpc echo {name}"] = Work(
                repeat(lambda array=arrays[name]: client.echo(array)), count
            )
        return time_calls(works, rounds=rounds)


def time_pushes(client: Client, *, rounds: int, calls: int) -> Timed:
    """Time arrays that stay there, against the copy alone."""
    works = {}
    for name, size, count in (
        ("1m", _MIB, calls // 5 + 1),
        ("32m", 32 * _MIB, calls // 250 + 1),
    ):
        array = np.ones(size // 4, np.float32)
        works[f"np.copyto {name}"] = Work(repeat(rpc_peers.array_copy(array)), count)
        works[f"rpc push {name}"] = Work(
            repeat(lambda array=array: client.push(array)), count
        )
    return time_calls(works, rounds=rounds)


def time_grpc(client: Client, *, rounds: int, calls: int) -> Timed:
    """Time calls through gRPC, ours and bare."""
    array = np.ones(32 * _MIB // 4, np.float32)
    with rpc_peers.bare_grpc(array) as bare:
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
    with rpc_peers.ray_actor(array) as actor:
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
            stack.enter_context(started("benchmarks.rpc_caller", address, share))
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


def measure_host(folder: Path, *, rounds: int, calls: int) -> Numbers:
    """Measure what happens on one host; show it."""
    with service(f"unix:{folder}/service") as child:
        address = child.read_line()
        with Client(address, timeout_s=TIMEOUT_S) as client:
            small = time_small(client, folder, rounds=rounds, calls=calls)
            echoes = time_echoes(client, folder, rounds=rounds, calls=calls)
            pushes = time_pushes(client, rounds=rounds, calls=calls)
            ray = None
            if _RAY.value and rpc_peers.is_installed("ray"):
                ray = time_ray(client, rounds=rounds, calls=calls)
        many_per_s = many_clients_per_s(
            address, processes=_PROCESSES.value, rounds=5, window_s=_WINDOW_S.value
        )
    show([small, echoes, pushes, *([ray] if ray else [])])
    print(f"{CLIENTS} clients, {_PROCESSES.value} processes: {many_per_s:.0f} calls/s")
    if ray is None:
        print("Ray is not measured: it is not installed, or --norpc_ray.")
    return {
        "noop_us": small.us("rpc no-op"),
        "noop_ratio": small.ratio("rpc no-op", "raw socket, 16 bytes"),
        "futures_per_s": 1e6 / small.us("rpc futures"),
        "clients16_per_s": many_per_s,
        "echo_1k_ratio": echoes.ratio("rpc echo 1k", "raw socket echo 1k"),
        "echo_1m_ratio": echoes.ratio("rpc echo 1m", "raw socket echo 1m"),
        "push_1m_ratio": pushes.ratio("rpc push 1m", "np.copyto 1m"),
        "push_32m_ratio": pushes.ratio("rpc push 32m", "np.copyto 32m"),
        "ray_noop_speedup": ray
        and ray.ratio("Ray actor no-op", "rpc no-op beside Ray"),
        "ray_array_speedup": ray
        and ray.ratio("Ray actor push 32m", "rpc push 32m beside Ray"),
        "raw_socket_us": small.us("raw socket, 16 bytes"),
        "zeromq_us": small.us("ZeroMQ, 16 bytes"),
        "ray_us": ray and ray.us("Ray actor no-op"),
    }


def measure_grpc(*, rounds: int, calls: int) -> Numbers:
    """Measure what goes through gRPC; show it."""
    with (
        service("grpc://127.0.0.1:0") as child,
        Client(child.read_line(), timeout_s=TIMEOUT_S) as client,
    ):
        timed = time_grpc(client, rounds=rounds, calls=calls)
    show([timed])
    return {
        "grpc_noop_ratio": timed.ratio("rpc no-op, gRPC", "bare grpcio no-op"),
        "grpc_push_ratio": timed.ratio("bare grpcio stream 32m", "rpc push 32m, gRPC"),
        "bare_grpc_us": timed.us("bare grpcio no-op"),
    }


def show(groups: list[Timed]) -> None:
    """Print the works of each group, peers beside ours."""
    table = Table("work", "µs a call", "calls/s")
    for timed in groups:
        for name in timed.seconds:
            us = timed.us(name)
            table.add_row(name, f"{us:.1f}", f"{1e6 / us:.0f}")
        table.add_section()
    Console().print(table)


def main(argv: list[str]) -> None:
    del argv
    sizes = {"rounds": _ROUNDS.value, "calls": _CALLS.value}
    with tempfile.TemporaryDirectory() as name, rpc_faults.program_secret(Path(name)):
        result = measure_host(Path(name), **sizes) | measure_grpc(**sizes)
        if _FAULTS.value:
            result |= rpc_faults.measure(Path(name))
    rounded = {
        key: None if value is None else round(value, 3) for key, value in result.items()
    }
    print(json.dumps(rounded))


if __name__ == "__main__":
    app.run(main)
