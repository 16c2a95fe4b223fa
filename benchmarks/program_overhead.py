"""Compare a call over an edge of a launched program with the same call of bare `rpc`.

One node of a program calls a method of another node, and the same method of a server
that is no part of any program; the two in turn, from the same process. Both servers are
processes of their own on this host, with one class, one pool size, one codec.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

import replicator.launchpad_bridge as lp
from benchmarks.rpc.processes import started
from benchmarks.rpc.service import Service
from benchmarks.timing import ratio, time_rounds
from replicator.base.types import PyTree
from replicator.rpc.client.client import Client

_ROUNDS = flags.DEFINE_integer("overhead_rounds", 25, "Interleaved blocks of each.")
_CALLS = flags.DEFINE_integer("overhead_calls", 500, "Calls in one block.")

_POOL_SIZE = 4
_ARRAY_BYTES = 1 << 20
_WORKS = ("noop", "echo")


def compare(
    edge: Client, address: str, rounds: int, calls: int
) -> Mapping[str, Sequence[float]]:
    """Time both, in a node; return the seconds of each round."""
    array = np.zeros(_ARRAY_BYTES, np.uint8)
    with Client(address) as bare:
        clients = {"edge": edge, "bare": bare}
        blocks: dict[str, Callable[[], None]] = {}
        for name, client in clients.items():
            blocks[f"noop {name}"] = _repeat(client.noop, calls)
            blocks[f"echo {name}"] = _repeat(
                lambda client=client: client.echo(array), max(1, calls // 10)
            )
        return time_rounds(blocks, rounds=rounds)


def measure(*, rounds: int, calls: int) -> Mapping[str, Sequence[float]]:
    """Run the program and the bare server; return the seconds of each round."""
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        path = f"unix:{Path(folder) / 'socket'}"
        with started("benchmarks.rpc.service", path, str(_POOL_SIZE)) as child:
            address = child.read_line()
            program = lp.Program("overhead")
            service = program.add_node(
                lp.CourierNode(
                    Service, courier_kwargs={"thread_pool_size": _POOL_SIZE}
                ),
                label="service",
            )
            program.add_node(
                lp.PyNode(compare, service, address, rounds, calls), label="caller"
            )
            with lp.launch(program, launch_type="processes") as run:
                run.wait(labels=["caller"])
                return run.results["caller"]


def _repeat(call: Callable[[], PyTree], calls: int) -> Callable[[], None]:
    def block() -> None:
        for _ in range(calls):
            call()

    return block


def main(argv: list[str]) -> None:
    del argv
    times_s = measure(rounds=_ROUNDS.value, calls=_CALLS.value)
    found = {
        work: ratio(times_s[f"{work} edge"], times_s[f"{work} bare"]) for work in _WORKS
    }
    for work, estimate in found.items():
        print(f"{work}: edge / bare {estimate}")
    noop_us = 1e6 * float(np.median(times_s["noop edge"])) / _CALLS.value
    result = {
        "ratio": round(found["noop"].median, 3),
        "ratio_low": round(found["noop"].low, 3),
        "array_ratio": round(found["echo"].median, 3),
        "noop_us": round(noop_us, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
