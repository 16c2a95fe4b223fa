"""Save and restore a state that is cut over processes, as one process of several.

Each process prints what it measured as JSON: bytes that it read and wrote by the
kernel's count, the most memory that it held, and seconds by round.
"""

import gc
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
from absl import app, flags, logging
from jax.sharding import NamedSharding, PartitionSpec

import replicator
from benchmarks.timing import seconds
from replicator.base.types import Key, PyTree
from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.checkpoint.retention import Retention
from replicator.distributed.agreement import exchange
from replicator.strategies import fsdp

_DIRECTORY = flags.DEFINE_string("directory", None, "Of all files.", required=True)
_STATE_MB = flags.DEFINE_integer("state_mb", 512, "Size of the whole state.")
_ROUNDS = flags.DEFINE_integer("rounds", 6, "Saves of each kind that are timed.")
_WEIGHTS = 16
_ROWS = 2048
_IO = Path("/proc/self/io")
_MIB = 2**20


def make_init(state_mb: int) -> Callable[[Key], PyTree]:
    """Return an `init_fn` of 16 matrices, with a vector of a few kB beside each."""
    columns = max(4, round(state_mb * _MIB / 4 / _WEIGHTS / _ROWS))

    def init_fn(key: Key) -> PyTree:
        keys = jax.random.split(key, _WEIGHTS)
        return {
            f"layer{number}": {
                "kernel": jax.random.normal(each, (_ROWS, columns)),
                "bias": jnp.ones(columns),
            }
            for number, each in enumerate(keys)
        }

    return init_fn


def measure(rep: replicator.Replicator, directory: Path) -> dict[str, Any]:
    """Return what this process measured."""
    barriers = map(str, itertools.count())

    def meet() -> None:
        exchange(f"checkpoint-shards/{next(barriers)}", None)

    # The first save and restore of a process load code, which is read from files too.
    small = rep.init(make_init(0))
    with CheckpointStore(directory / "small") as store:
        store.save(Snapshot(step=1, arrays=small))
        store.restore(small)
    state = rep.init(make_init(_STATE_MB.value))
    jax.block_until_ready(state)
    found: dict[str, Any] = {"state": nbytes(state), "shards": needed_bytes(state)}
    keep_all = Retention(keep_last=10**6)  # plain orbax deletes nothing either
    with CheckpointStore(directory / "ours", retention=keep_all) as store:
        meet()
        before, held = kernel_counts(), start_of_peak()
        store.save(Snapshot(step=1, arrays=state))
        found["peak"] = peak_bytes() - held
        found["written"] = kernel_counts()["wchar"] - before["wchar"]
        meet()
        for name, like in {"same": shapes(state), **other_layouts(state)}.items():
            before = kernel_counts()
            restored = store.restore(like)
            read = kernel_counts()["rchar"] - before["rchar"]
            assert restored is not None, "one step was saved"
            found[name] = {"read": read, "needed": needed_bytes(restored.arrays)}
            require_equal(state, restored.arrays)
            del restored
            meet()
        saves = time_saves(store, state, directory / "plain", meet)
        found |= saves | time_holds(store, state, meet)
    return found


def time_saves(
    store: CheckpointStore, state: PyTree, plain: Path, meet: Callable[[], None]
) -> dict[str, list[float]]:
    """Time saves until they are durable: ours, and plain orbax's, in turn."""
    orbaxs = orbax.checkpoint.AsyncCheckpointer(
        orbax.checkpoint.PyTreeCheckpointHandler()
    )

    def save_plain(number: int) -> None:
        save_args = orbax.checkpoint.args.PyTreeSave(state)
        orbaxs.save(plain / str(number), args=save_args)
        orbaxs.wait_until_finished()

    def save_ours(number: int) -> None:
        store.save(Snapshot(step=number + 2, arrays=state))

    times_s: dict[str, list[float]] = {"ours_s": [], "plain_s": []}
    for number in range(_ROUNDS.value + 1):
        for name, save in {"ours_s": save_ours, "plain_s": save_plain}.items():
            meet()
            took_s = seconds(lambda save=save, number=number: save(number))
            if number:  # the first round warms up
                times_s[name].append(took_s)
        meet()
        # What is not deleted has to be written back while the next ones are timed.
        store.discard_after(1)
        if jax.process_index() == 0:
            shutil.rmtree(plain, ignore_errors=True)
    orbaxs.close()
    return times_s


def time_holds(
    store: CheckpointStore, state: PyTree, meet: Callable[[], None]
) -> dict[str, list[float]]:
    """Time how long a save holds its loop, and a copy of the shards, in turn."""
    shards = [shard for leaf in jax.tree.leaves(state) for shard in own_shards(leaf)]
    times_s: dict[str, list[float]] = {"held_s": [], "copied_s": []}
    for number in range(_ROUNDS.value + 1):
        meet()
        copied_s = seconds(lambda: [np.array(shard) for shard in shards])
        meet()
        snapshot = Snapshot(step=number + 2, arrays=state)
        held_s = seconds(lambda snapshot=snapshot: store.save_nowait(snapshot))
        store.wait()
        if number:
            times_s["copied_s"].append(copied_s)
            times_s["held_s"].append(held_s)
        store.discard_after(1)
    return times_s


def other_layouts(state: PyTree) -> Mapping[str, PyTree]:
    """Return the state's shapes cut on the other axis, and cut in half, on two axes."""
    devices = np.array(jax.tree.leaves(state)[0].sharding.mesh.devices).reshape(-1)
    line = jax.sharding.Mesh(devices, ("shard",))
    square = jax.sharding.Mesh(devices.reshape(2, -1), ("row", "column"))

    def other_axis(leaf: jax.Array) -> NamedSharding:
        assert isinstance(leaf.sharding, NamedSharding)  # as `fsdp` makes them
        cut = leaf.sharding.spec
        first_is_cut = bool(cut) and cut[0] is not None
        spec = (None, "shard") if first_is_cut else ("shard",)
        return NamedSharding(line, PartitionSpec(*spec[: leaf.ndim]))

    def halves(leaf: jax.Array) -> NamedSharding:
        spec = ("row",) if leaf.ndim == 2 else ()
        return NamedSharding(square, PartitionSpec(*spec))

    def blocks(leaf: jax.Array) -> NamedSharding:
        spec = ("row", "column") if leaf.ndim == 2 else ("column",)
        return NamedSharding(square, PartitionSpec(*spec))

    return {
        choose.__name__: shapes(state, choose)
        for choose in (other_axis, halves, blocks)
    }


def shapes(
    state: PyTree, choose: Callable[[jax.Array], Any] = lambda leaf: leaf.sharding
) -> PyTree:
    """Return the state's shapes, with the shardings that `choose` returns."""

    def shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=choose(leaf))

    return jax.tree.map(shape, state)


def require_equal(state: PyTree, restored: PyTree) -> None:
    """Compare what this process has of both, where they are cut alike or across."""
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        for mine in old.addressable_shards:
            for other in new.addressable_shards:
                common = tuple(map(_common, mine.index, other.index, old.shape))
                pairs = zip(common, mine.index, other.index, strict=True)
                cuts = [(_inside(c, m), _inside(c, o)) for c, m, o in pairs]
                mine_cut, other_cut = zip(*cuts, strict=True)
                same = (
                    np.asarray(mine.data)[mine_cut] == np.asarray(other.data)[other_cut]
                )
                assert same.all(), "restored bits differ"


def _common(one: slice, other: slice, size: int) -> slice:
    first, second = one.indices(size), other.indices(size)
    start = max(first[0], second[0])
    return slice(start, max(start, min(first[1], second[1])))


def _inside(part: slice, whole: slice) -> slice:
    start = whole.start or 0
    return slice(max(part.start - start, 0), max(part.stop - start, 0))


def nbytes(state: PyTree) -> int:
    """Return the size of a state, each value once."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def needed_bytes(state: PyTree) -> int:
    """Return the size of the values of a state that this process holds, each once."""
    return sum(
        data.nbytes for leaf in jax.tree.leaves(state) for data in own_shards(leaf)
    )


def own_shards(leaf: jax.Array) -> Iterator[jax.Array]:
    """Yield the shards of a leaf that this process holds, equal ones once."""
    yield from {str(each.index): each.data for each in leaf.addressable_shards}.values()


def kernel_counts() -> dict[str, int]:
    """Return the bytes that this process read and wrote so far, by system calls."""
    lines = (line.split(":") for line in _IO.read_text().splitlines())
    return {name: int(count) for name, count in lines}


def start_of_peak() -> int:
    """Begin a new peak of this process's memory; return the bytes that it holds."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the most memory that this process held since `start_of_peak`."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)  # orbax logs 25 lines a save
    replicator.distributed.initialize()
    found = measure(replicator.Replicator(strategy=fsdp()), Path(_DIRECTORY.value))
    print(json.dumps(found))


if __name__ == "__main__":
    app.run(main)
