"""Count what an evaluation counts: every example once, with the same bits anywhere.

Every dataset size is evaluated on every number of replicas, cut into batches in another
way each time. A case fails unless every example was seen exactly once, `examples` says
how many there were, and all metrics of an MLP and of a convolution net have the bits
that one replica got. Then processes that share the replicas do the same.
"""

import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import replicator
from benchmarks.runs.group import run_group
from replicator.base.types import PyTree

_REPLICAS = flags.DEFINE_multi_integer("replicas", [1, 2, 3, 8], "Replica counts.")
_SIZES = flags.DEFINE_multi_integer(
    "sizes",
    [1, 2, 7, 63, 64, 65, 255, 256, 257, 1000, 2047, 2048, 2049, 10_000, 10_007],
    "Examples in a dataset.",
)
_PROCESSES = flags.DEFINE_multi_string(
    "processes", ["2x1", "3x1", "2x4"], "Processes x devices of each; none: `0x0`."
)
_IN_GROUP = flags.DEFINE_bool("in_group", False, "For this command's own processes.")
_DRAWN = flags.DEFINE_integer("drawn", 15, "Sizes drawn besides, up to the largest.")
_SEED = flags.DEFINE_integer("seed", 0, "Of examples, weights, and what is drawn.")


def examples(count: int, seed: int) -> PyTree:
    """Return examples that know their number."""
    rng = np.random.default_rng(seed)
    return {
        "id": np.arange(count, dtype=np.int32),
        "image": rng.standard_normal((count, 8, 8, 1), np.float32),
        "label": rng.integers(0, 10, count, np.int32),
    }


def weights(seed: int) -> PyTree:
    """Return the weights of both nets."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        scale = np.prod(shape[:-1]) ** -0.5
        return scale.astype(np.float32) * rng.standard_normal(shape, np.float32)

    return {
        "hidden": normal(64, 32),
        "mlp_head": normal(32, 10),
        "filters": normal(3, 3, 1, 8),
        "conv_head": normal(8, 10),
    }


def eval_fn(state: PyTree, batch: PyTree, *, most: int) -> dict[str, PyTree]:
    """Evaluate both nets, and say which examples were here."""
    mask, images = batch["mask"], batch["image"]
    hidden = jnp.tanh(images.reshape(len(images), -1) @ state["hidden"])
    features = jax.lax.conv_general_dilated(
        images,
        state["filters"],
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    mlp = _losses(hidden @ state["mlp_head"], batch["label"])
    conv = _losses(
        jax.nn.relu(features).mean((1, 2)) @ state["conv_head"], batch["label"]
    )
    count = mask.sum()
    mean = (conv * mask).sum() / jnp.maximum(count, 1)
    seen = jnp.zeros(most, jnp.int32).at[batch["id"]].add(mask.astype(jnp.int32))
    return {
        "mlp": mlp,
        "conv": conv,
        "mean": replicator.Mean(mean, count),
        "sum": replicator.Sum((mlp * mask).sum()),
        "max": replicator.Max(mlp.max()),
        "seen": replicator.Sum(seen),
    }


def count_failures(
    replicators: Mapping[str, replicator.Replicator], sizes: Sequence[int], *, seed: int
) -> tuple[int, int]:
    """Run every case; return how many failed, and how many there were.

    Args:
      replicators: By name; the first has one replica, to which all are compared.
      sizes: Of datasets.
      seed: Of examples, weights and cuts.
    """
    most, failures, cases = max(sizes), 0, 0
    data, state = examples(most, seed), weights(seed)
    rng = np.random.default_rng(seed)
    fn = functools.partial(eval_fn, most=most)
    evaluations = {
        name: each.compile_evaluation(fn) for name, each in replicators.items()
    }
    first = next(iter(evaluations))
    for size in sizes:
        rows = jax.tree.map(lambda leaf, n=size: leaf[:n], data)
        one = evaluations[first](state, [rows])
        for name, evaluation in evaluations.items():
            cut = int(rng.integers(1, size + 1))
            found = evaluation(state, batches(rows, cut))
            problem = _problem(found, one, size)
            failures += problem is not None
            cases += 1
            if problem:
                print(f"{size} examples by {cut} on {name}: {problem}")
        print(f"{size:6} examples: evaluated on {', '.join(evaluations)}", flush=True)
    return failures, cases


def count_in_processes(layout: str) -> tuple[int, int]:
    """Run every case in a group of processes; return failures, and cases.

    Args:
      layout: `2x4` for two processes of four devices each.
    """
    processes, devices = map(int, layout.split("x"))
    results = run_group(
        "benchmarks.eval_exact",
        ["--in_group", *sys.argv[1:]],
        processes=processes,
        devices=devices,
    )
    return sum(each["failures"] for each in results), results[0]["cases"]


def batches(rows: PyTree, size: int) -> Iterator[PyTree]:
    """Cut a dataset into batches of `size`; the last may be smaller."""
    for start in range(0, len(rows["id"]), size):
        yield jax.tree.map(lambda leaf, i=start: leaf[i : i + size], rows)


def _losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logs, labels[:, None], axis=1)[:, 0]


def _problem(found: PyTree, one: PyTree, size: int) -> str | None:
    if found["examples"] != size:
        return f"{found['examples']} examples were counted"
    wrong = np.flatnonzero(found["seen"] != (np.arange(len(found["seen"])) < size))
    if len(wrong):
        return f"example {wrong[0]} was seen {found['seen'][wrong[0]]} times"
    for name in one:
        if np.asarray(found[name]).tobytes() != np.asarray(one[name]).tobytes():
            return f"`{name}` is {found[name]!r}, on one replica {one[name]!r}"
    return None


def replicators_of_group() -> dict[str, replicator.Replicator]:
    """Join a group of processes; return one replica, and all that they share."""
    replicator.distributed.initialize()
    layout = f"{jax.process_count()}x{jax.local_device_count()}"
    alone = replicator.Replicator(num_replicas=1, devices=jax.local_devices())
    return {"1": alone, f"{layout} (processes)": replicator.Replicator()}


def main(argv: list[str]) -> None:
    del argv
    rng = np.random.default_rng(_SEED.value)
    drawn = rng.integers(1, max(_SIZES.value) + 1, _DRAWN.value).tolist()
    sizes = sorted({*_SIZES.value, *drawn})
    if _IN_GROUP.value:
        found = replicators_of_group()
        failures, cases = count_failures(found, sizes, seed=_SEED.value)
        print(json.dumps({"failures": failures, "cases": cases}))
        return
    replicator.fake_devices(max(_REPLICAS.value))
    replicators = {
        str(count): replicator.Replicator(num_replicas=count)
        for count in dict.fromkeys([1, *_REPLICAS.value])
    }
    failures, cases = count_failures(replicators, sizes, seed=_SEED.value)
    layouts = [layout for layout in _PROCESSES.value if layout != "0x0"]
    for layout in layouts:
        more_failures, more_cases = count_in_processes(layout)
        failures, cases = failures + more_failures, cases + more_cases
    result = {
        "failures": failures,
        "cases": cases,
        "replicas": _REPLICAS.value,
        "largest": max(sizes),
        "processes": layouts,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
