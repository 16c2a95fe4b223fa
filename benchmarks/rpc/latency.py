"""Time calls of one client that waits for each, with a core for each of the two ends.

Ours and what it is compared with run alike: all servers on one core, this process on
another (see `cores` for what would happen otherwise). A process keeps all of its
threads on its core. Nodes of a real program have a core each as well.

`np.copyto`, with which pushes are compared, is a copy of this process alone: a push
goes to another one, and its answer comes back.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.cores import CorePair, on_core
from benchmarks.rpc import peers
from benchmarks.rpc.processes import Child, started
from benchmarks.rpc.works import Timed, Work, repeat, time_calls
from replicator.rpc.client.client import Client

POOL_SIZE = 4
TIMEOUT_S = 60.0
_KIB, _MIB = 1 << 10, 1 << 20


@contextlib.contextmanager
def service(
    *addresses: str,
    pool_size: int = POOL_SIZE,
    core: int | None = None,
    is_trusting: bool = False,
) -> Iterator[Child]:
    """Serve in a second process; the first line it writes is the address."""
    arguments = [",".join(addresses), str(pool_size)]
    if is_trusting:
        arguments += ["", "trusted"]
    with started("benchmarks.rpc.service", *arguments, core=core) as child:
        yield child


def time_latencies(
    folder: Path, cores: CorePair | None, *, rounds: int, calls: int
) -> Timed:
    """Time all that has one call under way; without `cores`, wherever the ends run."""
    server, client_core = cores or (None, None)
    sizes = {"rounds": rounds, "calls": calls}
    folder.mkdir(mode=0o700)
    with (
        on_core(client_core),
        service(f"unix:{folder}/service", core=server) as child,
        service(f"unix:{folder}/trusting", core=server, is_trusting=True) as other,
        Client(child.read_line(), timeout_s=TIMEOUT_S) as client,
        Client(other.read_line(), timeout_s=TIMEOUT_S) as trusting,
    ):
        small = time_small(client, folder, core=server, **sizes)
        echoes = time_echoes(client, folder, core=server, **sizes)
        pushes = time_pushes(client, trusting, **sizes)
    return Timed({**small.seconds, **echoes.seconds, **pushes.seconds})


def time_small(
    client: Client, folder: Path, *, core: int | None, rounds: int, calls: int
) -> Timed:
    """Time calls that carry nothing."""
    with (
        peers.raw_echoes(folder, {"ping": 16}, core=core) as raw,
        peers.zeromq_ping(folder, core=core) as zeromq,
    ):
        works = {
            "raw socket, 16 bytes": Work(repeat(raw["ping"]), 2 * calls),
            "rpc no-op": Work(repeat(client.noop), calls),
            "ZeroMQ, 16 bytes": Work(repeat(zeromq), calls // 2 + 1),
        }
        return time_calls(works, rounds=rounds)


def time_echoes(
    client: Client, folder: Path, *, core: int | None, rounds: int, calls: int
) -> Timed:
    """Time arrays that come back, against their bytes alone."""
    sizes = {"1k": _KIB, "1m": _MIB}
    arrays = {name: np.ones(size // 4, np.float32) for name, size in sizes.items()}
    with peers.raw_echoes(folder, sizes, core=core) as raw:
        works = {}
        for name, count in (("1k", calls), ("1m", calls // 20 + 1)):
            works[f"raw socket echo {name}"] = Work(repeat(raw[name]), count)
            works[f"rpc echo {name}"] = Work(
                repeat(lambda array=arrays[name]: client.echo(array)), count
            )
        return time_calls(works, rounds=rounds)


def time_pushes(client: Client, trusting: Client, *, rounds: int, calls: int) -> Timed:
    """Time arrays that stay there, against the copy alone.

    Those of integers are copied once more by a server that does not trust its clients.
    """
    works = {}
    for name, size, count in (
        ("1m", _MIB, calls // 5 + 1),
        ("32m", 32 * _MIB, calls // 250 + 1),
    ):
        array = np.ones(size // 4, np.float32)
        works[f"np.copyto {name}"] = Work(repeat(peers.array_copy(array)), count)
        works[f"rpc push {name}"] = Work(
            repeat(lambda array=array: client.push(array)), count
        )
    integers = np.ones(32 * _MIB // 4, np.int32)
    count = calls // 250 + 1
    for name, callee in (("", client), (", trusted memory", trusting)):
        works[f"rpc push 32m of integers{name}"] = Work(
            repeat(lambda callee=callee: callee.push(integers)), count
        )
    return time_calls(works, rounds=rounds)
