"""Let many clients call one server in every way, for long; nothing may fail or grow.

The clients are threads of several processes: calls that carry nothing, arrays of 1 KiB
and 1 MiB, futures, errors, cancellations, deadlines, connections closed and opened
anew. What the server process holds is read twice, after a warm-up and at the end. Each
time no client calls, all have just connected anew, the server's idle threads have gone
home, and Python's collector of cycles and the allocator have given back what they keep.
"""

import contextlib
import dataclasses
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from benchmarks.rpc_processes import Child, started
from replicator.rpc.client import Client

_CLIENTS = flags.DEFINE_integer("clients", 64, "Clients in all.")
_MINUTES = flags.DEFINE_float("minutes", 1.0, "Length; a fifth of it is the warm-up.")
_PROCESSES = flags.DEFINE_integer("client_processes", 4, "Processes of the clients.")

POOL_SIZE = 8
_PAUSE_S = 180.0
_QUIET_S = 12.0  # an idle thread of a server goes home after 10
_LOOKS_S = 1.0
_WARM_UP = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What a process holds.

    Attributes:
      memory_kb: Resident.
      threads: Alive.
      descriptors: Open.
    """

    memory_kb: int
    threads: int
    descriptors: int


def held_by(pid: int) -> Held:
    """Read what a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    numbers = dict(re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE))
    return Held(
        memory_kb=int(numbers["VmRSS"]),
        threads=int(numbers["Threads"]),
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
    )


def held_when_quiet(server: Child, control: Client) -> Held:
    """Read it when what was under way is over: the least within a moment."""
    time.sleep(_QUIET_S)
    found = []
    for _ in range(10):
        control.give_back_memory()
        found.append(held_by(server.pid))
        time.sleep(_LOOKS_S / 10)
    return Held(
        memory_kb=min(held.memory_kb for held in found),
        threads=min(held.threads for held in found),
        descriptors=min(held.descriptors for held in found),
    )


def soak(
    server: Child, control: Client, crowds: Sequence[Child], *, seconds: float
) -> tuple[Held, Held, Sequence[dict]]:
    """Let clients call; return what the server held, and what the clients told."""
    held, told = [], []
    for crowd in crowds:
        crowd.read_line()
    for part_s in (_WARM_UP * seconds, (1 - _WARM_UP) * seconds):
        for crowd in crowds:
            crowd.tell("go")
        time.sleep(part_s)
        for crowd in crowds:
            crowd.tell("pause")
        told = [json.loads(crowd.read_line(timeout_s=_PAUSE_S)) for crowd in crowds]
        held.append(held_when_quiet(server, control))
        print(f"{sum(each['turns'] for each in told)} turns, server: {held[-1]}")
    return held[0], held[1], told


def result_of(before: Held, after: Held, told: Sequence[dict]) -> dict[str, float]:
    """Return the numbers that have bars."""
    return {
        "errors": sum(each["errors"] for each in told),
        "memory_growth": round(after.memory_kb / before.memory_kb - 1, 5),
        "thread_growth": after.threads - before.threads,
        "descriptor_growth": after.descriptors - before.descriptors,
        "turns": sum(each["turns"] for each in told),
    }


def main(argv: list[str]) -> None:
    del argv
    share = [_CLIENTS.value // _PROCESSES.value] * _PROCESSES.value
    share[0] += _CLIENTS.value - sum(share)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(
            started("benchmarks.rpc_service", f"unix:{folder}/service", str(POOL_SIZE))
        )
        address = server.read_line()
        crowds = [
            stack.enter_context(
                started("benchmarks.rpc_soak_clients", address, str(count), str(seed))
            )
            for seed, count in enumerate(share)
        ]
        control = stack.enter_context(Client(address, timeout_s=_PAUSE_S))
        seconds = 60 * _MINUTES.value
        before, after, told = soak(server, control, crowds, seconds=seconds)
    for text, count in (pair for each in told for pair in each["texts"]):
        print(f"{count} times: {text}")
    print(json.dumps(result_of(before, after, told)))


if __name__ == "__main__":
    app.run(main)
