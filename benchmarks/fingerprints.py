"""Damage copies of a state at random, and count the damages that a check names rightly.

A case damages one device's copy of one leaf: one bit, 2 to 64 bits at once, the sign of
each number, or the places of two rows; under data parallelism, `zero1` and `hybrid`, in
one process and in two. It is found if the check names the leaf and the device, or both
devices of a piece that has two copies. As many checks of undisturbed states follow.

The cost is the time that a check adds to a step, by blocks in turn: a step of about
50 ms alone, and one with a check of a state of 64 MB on each of 8 replicas behind it.
"""

import json
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import replicator
from benchmarks.runs.group import run_group
from benchmarks.timing import estimate, time_rounds
from replicator import strategies
from replicator.base.host.clock import SystemClock
from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.engine.fingerprints.copies import describe_place
from replicator.training.replica_check import begin_comparison

_DAMAGES = flags.DEFINE_integer("damages", 1000, "Damaged states, a tenth in a group.")
_CHECKS = flags.DEFINE_integer("checks", 1000, "Checks of undisturbed states.")
_ROUNDS = flags.DEFINE_integer("rounds", 12, "Steps with and without a check.")
_MB = flags.DEFINE_float("mb", 64, "Megabytes of state of a replica.")
_SEED = flags.DEFINE_integer("seed", 0, "Of states and damages.")
_IN_GROUP = flags.DEFINE_bool("in_group", False, "For this command's own processes.")
DEVICES = 8
STEP_S, STEPS_BETWEEN = 0.05, 100
STRATEGIES = {
    "data parallel": None,
    "zero1": strategies.zero1(whole_below_bytes=0),
    "hybrid": strategies.hybrid(shard=4, whole_below_bytes=0),
}
DTYPES = ("float32", "float16", "bfloat16", "int32", "int8", "uint16")
KINDS = ("one bit", "bits", "negated", "rows swapped")


def states(rep: Any, *, seed: int) -> PyTree:
    """Return a state of leaves of several dtypes, as under the strategy of `rep`."""
    rng = np.random.default_rng(seed)

    def numbers(dtype: str) -> np.ndarray:
        drawn = rng.normal(scale=50, size=(16, 24))
        return np.where(np.abs(drawn) < 1, 7, drawn).astype(jnp.dtype(dtype))

    params = {dtype: numbers(dtype) for dtype in DTYPES}
    return rep.put({"params": params, "opt": {"mu": params, "count": np.int32(3)}})


def damaged(piece: np.ndarray, kind: str, pick: random.Random) -> np.ndarray:
    """Return a copy of a piece with a damage of a kind; its bits differ."""
    found = piece.copy()
    match kind:
        case "negated":
            found = -found
        case "rows swapped":
            one, two = pick.sample(range(len(found)), 2)
            found[[one, two]] = found[[two, one]]
        case _:
            size = 8 * found.nbytes
            count = 1 if kind == "one bit" else pick.randint(2, min(64, size))
            flat = found.reshape(-1).view(np.uint8)
            for bit in pick.sample(range(size), count):
                flat[bit // 8] ^= 1 << bit % 8
    return found if found.tobytes() != piece.tobytes() else damaged(piece, "bits", pick)


def damage(state: PyTree, mesh: Any, pick: random.Random) -> tuple[PyTree, str, Any]:
    """Damage one copy; return the state, the path of the leaf, and the places to name.

    All processes of a mesh call it with the same `pick`.
    """
    devices = list(mesh.devices.flat)
    leaves, structure = jax.tree.flatten(state)
    copies = begin_comparison(state, mesh).leaves
    leaf, device = pick.choice(copies), pick.randrange(len(devices))
    array = leaves[leaf.number]
    shape = array.sharding.shard_shape(array.shape)
    kind = pick.choice(KINDS if len(shape) > 1 and shape[0] > 1 else KINDS[:2])
    # Drawn in all processes alike, whoever holds the piece.
    pieces = [shard.data for shard in array.addressable_shards]
    own = random.Random(pick.random())
    for number, piece in enumerate(pieces):
        if piece.devices() == {devices[device]}:
            wrong = damaged(np.asarray(piece), kind, own)
            pieces[number] = jax.device_put(wrong, piece.sharding)
    leaves[leaf.number] = jax.make_array_from_single_device_arrays(
        array.shape, array.sharding, pieces
    )
    held = [d for d, each in enumerate(leaf.pieces) if each == leaf.pieces[device]]
    named = held if len(held) == 2 else [device]
    places = [describe_place(mesh, d) for d in named]
    return structure.unflatten(leaves), leaf.path, places


def count(damages: int, checks: int, *, seed: int) -> dict[str, int]:
    """Return the damages found, and the alarms about undisturbed states."""
    pick = random.Random(seed)
    found = alarms = 0
    for number, (name, strategy) in enumerate(STRATEGIES.items()):
        rep = replicator.Replicator(strategy=strategy)
        state = states(rep, seed=seed)
        cases = len(range(number, damages, len(STRATEGIES)))
        here = 0
        for _ in range(cases):
            wrong, path, places = damage(state, rep.mesh, pick)
            odd = begin_comparison(wrong, rep.mesh).odd_leaves()
            named = [each.partition(" (")[0] for each in odd.get(path, ())]
            here += list(odd) == [path] and named == places
        for _ in range(number, checks, len(STRATEGIES)):
            alarms += bool(begin_comparison(state, rep.mesh).odd_leaves())
        watched = len(begin_comparison(state, rep.mesh).leaves)
        print(
            f"{name}: {here} of {cases} found, {watched} of "
            f"{len(named_leaves(state))} leaves have copies",
            flush=True,
        )
        found += here
    return {"found": found, "false_alarms": alarms}


def count_in_processes(damages: int, checks: int) -> dict[str, int]:
    """Return what `count` does in two processes of four devices each."""
    arguments = [
        *("--in_group", f"--damages={damages}", f"--checks={checks}"),
        f"--seed={_SEED.value}",
    ]
    print("in 2 processes")
    first, second = run_group(
        "benchmarks.fingerprints", arguments, processes=2, devices=DEVICES // 2
    )
    assert first == second, "all processes find the same"
    return first


def cost() -> dict[str, float]:
    """Time steps with and without a check behind them."""
    rep = replicator.Replicator()
    rows = max(1, round(_MB.value * 2**20 / 16 / 4096))
    rng = np.random.default_rng(_SEED.value)
    state = rep.put(
        [rng.normal(size=(rows, 1024)).astype(np.float32) for _ in range(16)]
    )
    step = _step_of(STEP_S)

    def check() -> None:
        assert not begin_comparison(state, rep.mesh).odd_leaves(), "nothing is damaged"

    def step_and_check() -> None:
        step()
        check()

    times_s = time_rounds(
        {"step": step, "checked": step_and_check}, rounds=_ROUNDS.value
    )
    added = estimate(np.subtract(times_s["checked"], times_s["step"]))
    share = 1 / (STEPS_BETWEEN * STEP_S)
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) * rep.mesh.devices.size
    print(
        f"a step of {1e3 * np.median(times_s['step']):.1f} ms; a check adds {added} s"
    )
    return {
        "cost": round(added.median * share, 4),
        "cost_low": round(added.low * share, 4),
        "cost_high": round(added.high * share, 4),
        "gb_per_s": round(read / added.median / 1e9, 3),
    }


def _step_of(seconds: float) -> Any:
    """Return a function that keeps the devices busy for about so long."""
    clock = SystemClock()
    matrix = jnp.ones((256, 256))
    multiply = jax.jit(lambda x: x @ x / 256)
    multiply(matrix).block_until_ready()

    def step() -> None:
        end_s = clock.now_s() + seconds
        while clock.now_s() < end_s:
            multiply(matrix).block_until_ready()

    return step


def main(argv: list[str]) -> None:
    del argv
    clock = SystemClock()
    began_s = clock.now_s()
    if _IN_GROUP.value:
        replicator.distributed.initialize()
        result = count(_DAMAGES.value, _CHECKS.value, seed=_SEED.value + 1)
        print(json.dumps(result))
        return
    replicator.fake_devices(DEVICES)
    some = _DAMAGES.value // 10, _CHECKS.value // 10
    result = count(_DAMAGES.value - some[0], _CHECKS.value - some[1], seed=_SEED.value)
    others = count_in_processes(*some)
    result = {name: result[name] + others[name] for name in result}
    seconds = round(clock.now_s() - began_s, 1)
    print(
        json.dumps({**result, **cost(), "damages": _DAMAGES.value, "seconds": seconds})
    )


if __name__ == "__main__":
    app.run(main)
