"""Let many clients call one server in every way, for long; nothing may fail or grow.

The clients are threads of several processes: calls that carry nothing, arrays of 1 KiB
and 1 MiB, futures, errors, cancellations, deadlines, connections closed and opened
anew. What the server process holds is read twice, after a warm-up and at the end. Each
time no client calls, all have just connected anew, the server's idle threads have gone
home, and Python's collector of cycles and the allocator have given back what they keep.
What the allocator cannot give back goes up and down by 2 %, so what counts is the least
of some readings, with a few calls between them. glibc has an arena for each thread, up
to eight for each core, that fill over the minutes; a server that has one (`--arenas=1`)
shows what grows besides.
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

from benchmarks.rpc.processes import Child, started
from replicator.rpc.client.client import Client

_CLIENTS = flags.DEFINE_integer("clients", 64, "Clients in all.")
_MINUTES = flags.DEFINE_float("minutes", 1.0, "Length; a fifth of it is the warm-up.")
_PROCESSES = flags.DEFINE_integer("client_processes", 4, "Processes of the clients.")
_ARENAS = flags.DEFINE_integer(
    "arenas", 0, "Of the server's glibc; 0: as many as it makes."
)
_READINGS = flags.DEFINE_integer("readings", 3, "Of what the server holds, each time.")

POOL_SIZE = 8
_PAUSE_S = 180.0
_QUIET_S = 12.0  # an idle thread of a server goes home after 10
_LOOKS_S = 1.0
_BETWEEN_S = 3.0
_WARM_UP = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Resources of a process.

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


def least(found: Sequence[Held]) -> Held:
    """Return the least of each."""
    return Held(
        memory_kb=min(held.memory_kb for held in found),
        threads=min(held.threads for held in found),
        descriptors=min(held.descriptors for held in found),
    )


def held_when_quiet(server: Child, control: Client) -> Held:
    """Read it when what was under way is over: the least within a moment."""
    time.sleep(_QUIET_S)
    found = []
    for _ in range(10):
        control.give_back_memory()
        found.append(held_by(server.pid))
        time.sleep(_LOOKS_S / 10)
    return least(found)


class Soak:
    """A server, and processes full of clients.

    Args:
      server: It.
      control: A client of our own.
      crowds: The processes of the others.
    """

    def __init__(self, server: Child, control: Client, crowds: Sequence[Child]) -> None:
        self._server = server
        self._control = control
        self._crowds = crowds
        self.told: Sequence[dict] = []
        for crowd in crowds:
            crowd.read_line()

    def call_and_read(self, seconds: float, *, readings: int) -> Held:
        """Call for so long; return the least that is held at the end of it.

        The readings but the first come shortly one after the other, so that they do not
        hide what grows all the time.
        """
        parts_s = [seconds, *[_BETWEEN_S] * (readings - 1)]
        return least([self._call(part_s) for part_s in parts_s])

    def _call(self, seconds: float) -> Held:
        for crowd in self._crowds:
            crowd.tell("go")
        time.sleep(seconds)
        for crowd in self._crowds:
            crowd.tell("pause")
        lines = [crowd.read_line(timeout_s=_PAUSE_S) for crowd in self._crowds]
        self.told = [json.loads(line) for line in lines]
        held = held_when_quiet(self._server, self._control)
        print(f"{sum(each['turns'] for each in self.told)} turns, server: {held}")
        return held


def result_of(before: Held, after: Held, told: Sequence[dict]) -> dict[str, float]:
    """Return the numbers that have bars."""
    return {
        "errors": sum(each["errors"] for each in told),
        "memory_growth": round(after.memory_kb / before.memory_kb - 1, 5),
        "thread_growth": max(0, after.threads - before.threads),
        "descriptor_growth": max(0, after.descriptors - before.descriptors),
        "turns": sum(each["turns"] for each in told),
    }


def main(argv: list[str]) -> None:
    del argv
    share = [_CLIENTS.value // _PROCESSES.value] * _PROCESSES.value
    share[0] += _CLIENTS.value - sum(share)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(
            started(
                *("benchmarks.rpc.service", f"unix:{folder}/service", str(POOL_SIZE)),
                variables={"MALLOC_ARENA_MAX": str(_ARENAS.value)}
                if _ARENAS.value
                else {},
            )
        )
        address = server.read_line()
        crowds = [
            stack.enter_context(
                started("benchmarks.rpc_soak.clients", address, str(count), str(seed))
            )
            for seed, count in enumerate(share)
        ]
        control = stack.enter_context(Client(address, timeout_s=_PAUSE_S))
        seconds, readings = 60 * _MINUTES.value, _READINGS.value
        soak = Soak(server, control, crowds)
        before = soak.call_and_read(_WARM_UP * seconds, readings=readings)
        after = soak.call_and_read((1 - _WARM_UP) * seconds, readings=readings)
    for text, count in (pair for each in soak.told for pair in each["texts"]):
        print(f"{count} times: {text}")
    print(json.dumps(result_of(before, after, soak.told)))


if __name__ == "__main__":
    app.run(main)
