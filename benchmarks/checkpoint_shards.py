"""Save a state that is cut over processes; restore it cut alike and otherwise.

`replicator launch` starts the processes (`benchmarks.runs.shards_process`), each with
one device; together they hold one state under `fsdp`. Bytes are the kernel's counts of
what system calls read and wrote. Times of a round are those of the slowest process;
saves and those of plain orbax take turns in the same processes.

On a CPU the copy of the shards that a save makes on the device is host memory, too: it
is in `peak_ratio`. `reshard_reads` is the largest of three layouts: cut on the other
axis, cut in half on two replicas, cut on both axes.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks.runs.group import run_group
from benchmarks.timing import ratio
from replicator.base.host.clock import SystemClock

_PROCESSES = flags.DEFINE_integer("processes", 4, "Processes, of one device each.")
_STATE_MB = flags.DEFINE_integer("state_mb", 512, "Size of the whole state.")
_ROUNDS = flags.DEFINE_integer("rounds", 6, "Saves of each kind that are timed.")
_OTHERS = ("other_axis", "halves", "blocks")


def reads_ratio(found: Sequence[Mapping[str, Any]], layout: str) -> float:
    """Return the bytes that all processes read / those that they needed."""
    read, needed = (
        sum(each[layout][name] for each in found) for name in ("read", "needed")
    )
    return read / needed


def slowest(found: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return the seconds of each round, those of its slowest process."""
    return np.max([each[name] for each in found], axis=0).tolist()


def main(argv: list[str]) -> None:
    del argv
    clock = SystemClock()
    started_s = clock.now_s()
    with tempfile.TemporaryDirectory() as folder:
        found = run_group(
            "benchmarks.runs.shards_process",
            [
                f"--directory={folder}",
                f"--state_mb={_STATE_MB.value}",
                f"--rounds={_ROUNDS.value}",
            ],
            processes=_PROCESSES.value,
            devices=1,
        )
    saves = ratio(slowest(found, "ours_s"), slowest(found, "plain_s"))
    held = ratio(slowest(found, "held_s"), slowest(found, "copied_s"))
    others = {layout: reads_ratio(found, layout) for layout in _OTHERS}
    print(f"a save takes {saves} times as long as plain orbax's")
    print(f"it holds the loop {held} times as long as a copy of the shards takes")
    result = {
        "peak_ratio": round(max(each["peak"] / each["shards"] for each in found), 3),
        "bytes_ratio": round(
            sum(each["written"] for each in found) / found[0]["state"], 4
        ),
        "restore_reads": round(reads_ratio(found, "same"), 4),
        "reshard_reads": round(max(others.values()), 4),
        **{f"{layout}_reads": round(reads, 4) for layout, reads in others.items()},
        "seconds_ratio": round(saves.low, 3),
        "seconds_ratio_median": round(saves.median, 3),
        "seconds_per_save": round(float(np.median(slowest(found, "ours_s"))), 3),
        "blocked_ratio": round(held.median, 3),
        "blocked_ms": round(1e3 * float(np.median(slowest(found, "held_s"))), 1),
        "processes": _PROCESSES.value,
        "state_mb": _STATE_MB.value,
        "seconds": round(clock.now_s() - started_s, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
