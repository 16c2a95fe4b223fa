"""Count what the replication proof gets wrong in programs whose truth is known.

Wrong programs and deadlocks must be refused, right ones accepted. The truth of those
that end is not taken on trust: each is run without a proof, and its results compared in
their bits. Deadlocks are only traced. Losses that mean another thing on more replicas
must be refused, too: what they learn is compared with one replica's. Losses whose
examples meet in a collective must be warned of under accumulation, and no others: what
they learn is compared with what one microbatch teaches.
"""

import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import PartitionSpec

import replicator
from benchmarks.proof.deadlocks import DEADLOCKS
from benchmarks.proof.losses import RIGHT_LOSSES, WRONG_LOSSES
from benchmarks.proof.meeting import APART, MEET, NORMS, Loss, batch, weights
from benchmarks.proof.right import RIGHT
from benchmarks.proof.wrong import AXIS, WRONG, Program
from replicator.base.mesh import replica_mesh
from replicator.base.types import PyTree
from replicator.errors import ReplicationError

REPLICAS = 4

_RUN = flags.DEFINE_bool("run", True, "Run what ends, to see whether its truth is so.")


@dataclasses.dataclass
class Counts:
    """Results for one kind of programs."""

    misjudged: int = 0  # by the proof
    mislabelled: int = 0  # by us: they are not what they are said to be
    broken: int = 0  # this version of JAX cannot trace or run them


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
    found = _unproved(lambda *given: _digest(program(*given)), REPLICAS)
    return len({each.tobytes() for each in found}) == 1


def agrees_with_one(program: Program) -> bool:
    """Run `program` without a proof; tell whether one replica finds the same."""
    many, one = (_unproved(program, n)[0] for n in (REPLICAS, 1))
    return bool(np.abs(many - one).max() <= 1e-4 * np.abs(one).max())


def _unproved(program: Program, num_replicas: int) -> np.ndarray:
    spread = jax.shard_map(
        lambda x, w, key: program(x, w, key)[None],
        mesh=replica_mesh(num_replicas),
        in_specs=(PartitionSpec(AXIS), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(AXIS),
        check_vma=False,
    )
    return np.asarray(jax.jit(spread)(_examples(), _weights(), jax.random.key(0)))


def trained(loss: Loss, accumulate: int, *, run: bool) -> tuple[np.ndarray, str | None]:
    """Make an update with microbatches; return its step, and what is warned of."""
    rep = replicator.Replicator(num_replicas=2, compilation_cache=False)
    optimizer = rep.wrap_optimizer(optax.sgd(1.0))

    def step_fn(state, batch):
        grads = jax.grad(loss)(state["w"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["w"])
        return {"w": state["w"] + updates, "opt": opt}, {}

    state = rep.put({"w": weights(), "opt": optimizer.init(weights())})
    step = rep.compile(step_fn, accumulate=accumulate)
    with (
        warnings.catch_warnings(record=True) as said,
        jax.numpy_dtype_promotion("standard"),
    ):
        warnings.simplefilter("always", replicator.MicrobatchCollectiveWarning)
        step.lower(state, batch(32))
        moved = step(state, batch(32))[0]["w"] - weights() if run else weights()
    found = [str(each.message) for each in said if "microbatch" in str(each.message)]
    return np.asarray(moved), found[0] if found else None


def judge_losses(losses: Mapping[str, Loss], *, meet: bool | None, run: bool) -> Counts:
    """Judge losses under accumulation; print the names of those that are misjudged.

    Args:
      losses: By name.
      meet: Whether their examples meet; None for those that no warning is due of
        whether they do or not.
      run: Whether to see if microbatches make another update.
    """
    counts = Counts()
    for name, loss in losses.items():
        cut, found = trained(loss, 4, run=run)
        whole, _ = trained(loss, 1, run=run)
        apart = np.linalg.norm(cut - whole) > 1e-4 * np.linalg.norm(whole)
        if (found is not None) != bool(meet):
            counts.misjudged += 1
            print(f"{name}: {found or 'no warning'}", flush=True)
        if run and meet is not None and apart != meet:
            counts.mislabelled += 1
            print(f"{name}: microbatches {'do not ' * meet}matter", flush=True)
    return counts


def judge(
    programs: Mapping[str, Program],
    is_right: Callable[[str | None], bool],
    *,
    agreeing: bool | None = None,
    agrees: Callable[[Program], bool] = agrees,
) -> Counts:
    """Judge `programs`; print the names of those that are misjudged.

    Args:
      programs: By name.
      is_right: Whether that refusal (or None) is what a program deserves.
      agreeing: What a run must show of its replicas; None runs nothing.
      agrees: Runs a program, and tells that.
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
    """Return whether a refusal is about replicas that may drift apart."""
    return "may differ between replicas" in (found or "")


def is_deadlock(found: str | None) -> bool:
    """Return whether a refusal is about replicas that would wait for ever."""
    return "must be reached by all replicas" in (found or "")


def is_other_loss(found: str | None) -> bool:
    """Return whether a refusal is about a loss that changes with the replicas."""
    words = ("`loss_fn` must", "`global_loss` must", "`grads` must")
    return (found or "").startswith(words)


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
    other = judge(
        WRONG_LOSSES,
        is_other_loss,
        agreeing=False if run else None,
        agrees=agrees_with_one,
    )
    same = judge(
        RIGHT_LOSSES,
        lambda found: found is None,
        agreeing=True if run else None,
        agrees=agrees_with_one,
    )
    meeting = judge_losses(MEET, meet=True, run=run)
    apart = judge_losses(APART, meet=False, run=run)
    norms = judge_losses(NORMS, meet=None, run=run)
    kinds = (wrong, hanging, right, other, same, meeting, apart, norms)
    result = {
        "wrong_accepted": sum(
            each.misjudged for each in (wrong, hanging, other, meeting)
        ),
        "right_refused": sum(each.misjudged for each in (right, same, apart, norms)),
        "mislabelled": sum(each.mislabelled for each in kinds),
        "broken": sum(each.broken for each in kinds),
        "wrong": len(WRONG) + len(WRONG_LOSSES) + len(MEET),
        "deadlocks": len(DEADLOCKS),
        "right": len(RIGHT) + len(RIGHT_LOSSES) + len(APART) + len(NORMS),
        "jax": jax.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
