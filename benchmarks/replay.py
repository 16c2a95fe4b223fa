"""Measure replay tables: samples, updates, inserts; in process, and over `rpc`.

All rows are drawn from. Frames of Atari (84 x 84 x 4 bytes): a prioritised, and a
uniform, sample of 256 beside `np.take` of as many, in turns. Rows of 200 bytes, a
million of them: a sample, and 256 updates, beside the plain sum tree, by processor
time, the best of many. Over `rpc`: rows that come into a learner's batch from a table
in another process, beside one in this process; and what stays of them while four actors
insert 800 frames a second each. And the longest that an insert is held while all frames
are saved, the median of five saves.
"""

import contextlib
import functools
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from absl import app, flags

import replicator.launchpad_bridge as lp
from benchmarks.replay_peers import ACTORS, BATCH, FRAME, atari_table
from benchmarks.rpc.processes import started
from benchmarks.timing import ratio, time_rounds
from replicator.launchpad_bridge.learner.trajectory_batches import TrajectoryBatches
from replicator.rpc.client.client import Client
from replicator.rpc.codec.message_limits import MessageLimits

_FRAMES = flags.DEFINE_integer("frames", 50_000, "Capacity of tables of Atari frames.")
_ROWS = flags.DEFINE_integer("rows", 1_000_000, "Capacity of that of small rows.")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Blocks of each, in turns.")
_CALLS = flags.DEFINE_integer("calls", 40, "Samples in one block.")
_BATCHES = flags.DEFINE_integer("batches", 160, "Batches in one block, over `rpc`.")
_SAMPLES_PER_CALL = flags.DEFINE_integer(
    "samples_per_call", 8, "Samples that the learner's feed takes by one call."
)
_BEST_OF = flags.DEFINE_integer("best_of", 300, "Calls that the best is chosen of.")

_PEERS = "benchmarks.replay_peers"
_INSERT = 20
_SOON_S = 60.0
_PAUSE_S = 0.0005
_SAVES = 5


class PlainTree:
    """A sum tree in a dozen lines of NumPy, without checks."""

    def __init__(self, capacity: int) -> None:
        self._first = 1 << (capacity - 1).bit_length()
        self._nodes = np.zeros(2 * self._first)

    def update(self, slots: np.ndarray, masses: np.ndarray) -> None:
        """Give rows other masses."""
        nodes = slots + self._first
        self._nodes[nodes] = masses
        while nodes[0] > 1:
            nodes = nodes >> 1
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def draw(self, numbers: np.ndarray) -> np.ndarray:
        """Return rows for numbers in [0, 1)."""
        rest, nodes = numbers * self._nodes[1], np.ones(len(numbers), np.int64)
        while nodes[0] < self._first:
            nodes = 2 * nodes
            left = self._nodes[nodes]
            is_right = rest >= left
            rest, nodes = rest - left * is_right, nodes + is_right
        return nodes - self._first


def best_us(call: Callable[[], object]) -> float:
    """Return the least processor time of many calls, in microseconds."""
    best_ns = float("inf")
    for _ in range(_BEST_OF.value):
        started_ns = time.process_time_ns()
        call()
        best_ns = min(best_ns, time.process_time_ns() - started_ns)
    return best_ns / 1e3


def small_rows() -> dict[str, float]:
    """Time a table of many small rows against the plain tree."""
    capacity, random = _ROWS.value, np.random.default_rng(0)
    table = lp.ReplayTable(capacity, sampler=lp.prioritised(0.6), finite=())
    tree, rows = PlainTree(capacity), np.zeros((_INSERT, 200), np.uint8)
    fill = np.zeros((min(capacity, 10_000), 200), np.uint8)
    for _ in range(0, capacity, len(fill)):
        values = random.random(len(fill))
        table.insert({"row": fill}, actor="a", version=0, priorities=values)
    tree.update(np.arange(capacity), random.random(capacity))
    values = random.random(BATCH)

    def sample() -> np.ndarray:
        taken = table.take(BATCH, timeout_s=_SOON_S)
        assert taken is not None
        assert taken.keys is not None
        return taken.keys

    keys = iter([sample() for _ in range(_BEST_OF.value)])
    slots = iter([random.integers(0, capacity, BATCH) for _ in range(_BEST_OF.value)])
    found = {
        "sample": best_us(sample),
        "tree_sample": best_us(lambda: tree.draw(random.random(BATCH))),
        "update": best_us(lambda: table.update_priorities(next(keys), values)),
        "tree_update": best_us(lambda: tree.update(next(slots), values)),
        "insert": best_us(lambda: table.insert({"row": rows}, actor="a", version=0)),
    }
    return {f"{name}_us": round(us, 1) for name, us in found.items()}


def block(call: Callable[[], object], calls: int | None = None) -> Callable[[], None]:
    """Return a function that makes many calls."""

    def run() -> None:
        for _ in range(calls or _CALLS.value):
            call()

    return run


def sample_of(table: lp.ReplayTable | Client) -> Callable[[], object]:
    """Return a function that takes a sample."""
    return functools.partial(table.take, BATCH, timeout_s=_SOON_S)


def frames_in_process() -> dict[str, float]:
    """Time samples of frames against `np.take`."""
    random = np.random.default_rng(0)
    tables = {"sample": atari_table(_FRAMES.value)}
    tables["uniform"] = atari_table(_FRAMES.value, sampler=lp.uniform())
    frames = np.zeros((_FRAMES.value, *FRAME), np.uint8) + np.uint8(1)

    def take() -> None:
        np.take(frames, random.integers(0, len(frames), BATCH), axis=0)

    calls = {name: sample_of(table) for name, table in tables.items()}
    blocks = {name: block(call) for name, call in (*calls.items(), ("take", take))}
    times_s = time_rounds(blocks, rounds=_ROUNDS.value)
    found = {}
    for name in tables:
        estimate = ratio(times_s["take"], times_s[name])
        print(f"{name} of frames: {estimate} of np.take")
        found[f"{name}_ratio"] = round(estimate.median, 3)
    per_call_s = float(np.median(times_s["sample"])) / _CALLS.value
    return found | {"samples_per_s": round(BATCH / per_call_s, 0)}


def holds_ms() -> dict[str, float]:
    """Return the longest wait of an insert during a save: the median of several.

    One that the machine held up, with another program or a virtual neighbour, says
    nothing of the table: the worst of them has no bar.
    """
    holds_s = [longest_hold_s() for _ in range(_SAVES)]
    found = {"hold_ms": statistics.median(holds_s), "hold_worst_ms": max(holds_s)}
    return {name: round(1e3 * hold_s, 2) for name, hold_s in found.items()}


def longest_hold_s() -> float:
    """Return the longest wait of an insert while a table of frames is saved."""
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        table = atari_table(_FRAMES.value, checkpoint_dir=folder)
        frames, longest_s = np.zeros((1, *FRAME), np.uint8), 0.0
        with ThreadPoolExecutor(1) as pool:
            saving = pool.submit(table.save)
            while not saving.done():
                started_s = time.monotonic()
                table.insert({"frames": frames}, actor="a", version=0)
                longest_s = max(longest_s, time.monotonic() - started_s)
                time.sleep(_PAUSE_S)  # as an actor that acts; or the processor is full
            saving.result()
    return longest_s


def batch_of(table: Any) -> Callable[[], object]:
    """Return a function that returns the next batch of a learner's feed."""
    batches = TrajectoryBatches(
        table,
        BATCH,
        is_stopping=lambda: False,
        reached=lambda *_: True,
        samples_per_call=_SAMPLES_PER_CALL.value,
    )
    return functools.partial(next, batches)


def frames_served() -> dict[str, float]:
    """Time batches of a table in another process, also while actors insert."""
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(started(_PEERS, "table", str(_FRAMES.value)))
        address = served.read_line(timeout_s=2 * _SOON_S)
        actors = [
            stack.enter_context(started(_PEERS, "actor", address))
            for _ in range(ACTORS)
        ]
        for actor in actors:
            actor.read_line()

        def tell(line: str) -> None:
            for actor in actors:
                actor.tell(line)
            for actor in actors:
                actor.read_line()

        limits = MessageLimits(trusted_memory=True)
        client = stack.enter_context(Client(address))
        trusting = stack.enter_context(Client(address, limits=limits))
        table = atari_table(_FRAMES.value)
        blocks = {
            name: block(batch_of(each), _BATCHES.value)
            for name, each in (
                ("in process", table),
                ("served", client),
                ("served_trusted", trusting),
            )
        }

        def while_actors_insert() -> None:
            tell("go")
            blocks["served_trusted"]()
            tell("wait")

        blocks["mixed"] = while_actors_insert
        times_s = time_rounds(blocks, rounds=_ROUNDS.value)
    found = {
        "served_ratio": ratio(times_s["in process"], times_s["served"]),
        "served_trusted_ratio": ratio(times_s["in process"], times_s["served_trusted"]),
        "mixed": ratio(times_s["served_trusted"], times_s["mixed"]),
    }
    for name, estimate in found.items():
        print(f"{name}: {estimate}")
    return {name: round(estimate.median, 3) for name, estimate in found.items()}


def main(argv: list[str]) -> None:
    del argv
    started_s = time.monotonic()
    # As in a node's process (`preloading`): a search through all that was imported
    # holds up every thread for 50 ms.
    gc.collect()
    gc.freeze()
    small = small_rows()
    result = {
        **frames_in_process(),
        **frames_served(),
        **holds_ms(),
        "sample_over_tree": round(small["sample_us"] / small["tree_sample_us"], 2),
        "update_over_tree": round(small["update_us"] / small["tree_update_us"], 2),
        **small,
    }
    seconds = time.monotonic() - started_s
    print(json.dumps(result | {"seconds": round(seconds, 1)}))


if __name__ == "__main__":
    app.run(main)
