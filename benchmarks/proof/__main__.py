"""Count what the replication proof gets wrong in programs whose truth is known.

Wrong programs and deadlocks must be refused, right ones accepted. The truth of those
that end is not taken on trust: each is run without a proof, and its results compared in
their bits. Deadlocks are only traced.
"""

import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import PartitionSpec

import replicator
from benchmarks.proof.deadlocks import DEADLOCKS
from benchmarks.proof.right import RIGHT
from benchmarks.proof.wrong import AXIS, WRONG, Program
from replicator.base.mesh import replica_mesh
from replicator.base.types import PyTree
from replicator.errors import ReplicationError

REPLICAS = 4

_RUN = flags.DEFINE_bool("run", True, "Run what ends, to see whether its truth is so.")


def refusal(program: Program) -> str | None:
    """Return why the proof refuses `program`, None if it accepts it."""

    def step_fn(state, batch, key):
        found = program(batch["x"], state["w"], key)
        return {"w": state["w"], "found": _digest(found)}, {}

    rep = replicator.Replicator(num_replicas=REPLICAS, compilation_cache=False)
    state = {"w": _weights(), "found": jnp.zeros(())}
    try:
        with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
            warnings.simplefilter("ignore", replicator.SharedRandomKeyWarning)
            rep.compile(step_fn).lower(state, {"x": _examples()}, jax.random.key(0))
    except ReplicationError as failure:
        return str(failure)
    return None


def agrees(program: Program) -> bool:
    """Run `program` without a proof; tell whether replicas get the same bits."""
    spread = jax.shard_map(
        lambda x, w, key: _digest(program(x, w, key))[None],
        mesh=replica_mesh(REPLICAS),
        in_specs=(PartitionSpec(AXIS), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(AXIS),
        check_vma=False,
    )
    found = np.asarray(jax.jit(spread)(_examples(), _weights(), jax.random.key(0)))
    return len({each.tobytes() for each in found}) == 1


@dataclasses.dataclass
class Counts:
    """What was found about one kind of programs."""

    misjudged: int = 0  # by the proof
    mislabelled: int = 0  # by us: they are not what they are said to be
    broken: int = 0  # this version of JAX cannot trace or run them


def judge(
    programs: Mapping[str, Program],
    is_right: Callable[[str | None], bool],
    *,
    agreeing: bool | None = None,
) -> Counts:
    """Judge `programs`; print the names of those that are misjudged.

    Args:
      programs: By name.
      is_right: Whether that refusal (or None) is what a program deserves.
      agreeing: What a run must show of its replicas; None runs nothing.
    """
    counts = Counts()
    for name, program in programs.items():
        try:
            found = refusal(program)
            differs = agreeing is not None and agrees(program) != agreeing
        except Exception as failure:
            counts.broken += 1
            print(f"{name}: {type(failure).__name__}: {failure}", flush=True)
            continue
        if not is_right(found):
            counts.misjudged += 1
            print(f"{name}: {found or 'accepted'}", flush=True)
        if differs:
            counts.mislabelled += 1
            print(f"{name}: replicas {'differ' if agreeing else 'agree'}", flush=True)
    return counts


def is_drift(found: str | None) -> bool:
    """Tell whether a refusal says that replicas may drift apart."""
    return "may differ between replicas" in (found or "")


def is_deadlock(found: str | None) -> bool:
    """Tell whether a refusal says that some replicas would wait for ever."""
    return "must be reached by all replicas" in (found or "")


def _digest(outputs: PyTree) -> jax.Array:
    """Return one number in which every number of `outputs` counts."""
    total = jnp.zeros(())
    for leaf in jax.tree.leaves(outputs):
        flat = jnp.ravel(leaf).astype(jnp.float32)
        total += flat @ (1 + jnp.arange(flat.size, dtype=jnp.float32))
    return total


def _examples() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.standard_normal((4 * REPLICAS, 3)).astype(np.float32)


def _weights() -> jax.Array:
    return jnp.asarray([0.5, -1.0, 2.0])


def main(argv: list[str]) -> None:
    del argv
    replicator.fake_devices(REPLICAS)
    run = _RUN.value
    wrong = judge(WRONG, is_drift, agreeing=False if run else None)
    hanging = judge(DEADLOCKS, is_deadlock)
    right = judge(RIGHT, lambda found: found is None, agreeing=True if run else None)
    kinds = (wrong, hanging, right)
    result = {
        "wrong_accepted": wrong.misjudged + hanging.misjudged,
        "right_refused": right.misjudged,
        "mislabelled": sum(each.mislabelled for each in kinds),
        "broken": sum(each.broken for each in kinds),
        "wrong": len(WRONG),
        "deadlocks": len(DEADLOCKS),
        "right": len(RIGHT),
        "jax": jax.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
