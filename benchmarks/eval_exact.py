"""Count what an evaluation counts: every example once, with the same bits anywhere.

Every dataset size is evaluated on every number of replicas, cut into batches in another
way each time. A case fails unless every example was seen exactly once, `examples` says
how many there were, and all metrics of an MLP and of a convolution net have the bits
that one replica got. One process so far: several will take turns here when they can.
"""

import functools
import json
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import replicator
from replicator.protocols import PyTree

_REPLICAS = flags.DEFINE_multi_integer("replicas", [1, 2, 3, 8], "Replica counts.")
_SIZES = flags.DEFINE_multi_integer(
    "sizes",
    [1, 2, 7, 63, 64, 65, 255, 256, 257, 1000, 2047, 2048, 2049, 10_000, 10_007],
    "Examples in a dataset.",
)
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
    replicas: Sequence[int], sizes: Sequence[int], *, seed: int
) -> tuple[int, int]:
    """Run every case; return how many failed, and how many there were."""
    most, failures, cases = max(sizes), 0, 0
    data, state = examples(most, seed), weights(seed)
    rng = np.random.default_rng(seed)
    fn = functools.partial(eval_fn, most=most)
    evaluations = {
        count: replicator.Replicator(num_replicas=count).compile_evaluation(fn)
        for count in dict.fromkeys([1, *replicas])
    }
    for size in sizes:
        rows = jax.tree.map(lambda leaf, n=size: leaf[:n], data)
        one = evaluations[1](state, [rows])
        for count in replicas:
            cut = int(rng.integers(1, size + 1))
            found = evaluations[count](state, batches(rows, cut))
            problem = _problem(found, one, size)
            failures += problem is not None
            cases += 1
            if problem:
                print(f"{size} examples by {cut} on {count} replicas: {problem}")
        print(f"{size:6} examples: evaluated on {', '.join(map(str, replicas))}")
    return failures, cases


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


def main(argv: list[str]) -> None:
    del argv
    replicator.fake_devices(max(_REPLICAS.value))
    rng = np.random.default_rng(_SEED.value)
    drawn = rng.integers(1, max(_SIZES.value) + 1, _DRAWN.value).tolist()
    sizes = sorted({*_SIZES.value, *drawn})
    failures, cases = count_failures(_REPLICAS.value, sizes, seed=_SEED.value)
    result = {
        "failures": failures,
        "cases": cases,
        "replicas": _REPLICAS.value,
        "largest": max(sizes),
        "processes": 1,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
