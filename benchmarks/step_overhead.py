"""Compare a replicated step, and its loop, with the ones written by hand.

Six claims. `same_program`: our compiled step does what `jit(shard_map)` with optax
does by hand, operation for operation, byte for byte on the wire, before and after XLA
(design law 8). `bare_ratio_low`: in a loop of one's own it takes no longer than by
hand, on eight fake devices. `ratio_low`: nor does `rep.run`, with the gradient's norm
that both then report. `overhead_us`: what `rep.run` costs the host in each step, seen
on one device with a step that does nothing. `overhead_ratio`: how many bare calls of
such a step that is, where the state is a model's: 160 arrays. And `checksum_us`: what
the input thread spends on the checksum of a batch of six arrays of 38 MB, by which a
run that goes on knows its input again.

Both loops start from the same NumPy batches, place them, dispatch, and keep four steps
in flight. Ours also does what a run does: it checks and masks each batch in the input
thread, counts steps, folds a key, measures rates, and looks for NaN in its metrics; the
display and the files are off. The loop by hand reads no metric. Against the empty step
stands the barest loop there is: it hands its NumPy batch to a jitted function.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from rich.console import Console
from rich.table import Table

import replicator
from benchmarks.step.hlo_counts import (
    Operations,
    compiled_operations,
    lowered_operations,
)
from benchmarks.step.run_against import OURS, time_run_against
from benchmarks.step.step_pair import (
    OwnLoop,
    hand_written_state,
    hand_written_step,
    replicator_init,
    replicator_step,
)
from benchmarks.tasks import Task, digits_resnet, mlp
from benchmarks.timing import Estimate, estimate, ratio, time_rounds
from replicator.base.mesh import split_over_replicas
from replicator.base.types import PyTree
from replicator.hooks import Hook
from replicator.inputs.checksums import checksum

DEVICES = 8
_LEAVES = 160
_ROUNDS = flags.DEFINE_integer("rounds", 40, "Interleaved blocks of each loop.")
_STEPS = flags.DEFINE_integer("steps", 20, "Steps per block.")
_WIDTH = flags.DEFINE_integer("width", 2, "Width of the timed ResNet: step time.")
_EMPTY_STEPS = flags.DEFINE_integer("empty_steps", 2000, "Empty steps per block.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Operations of a program before and after XLA."""

    lowered: Operations
    compiled: Operations


def programs_of(task: Task, rep: replicator.Replicator) -> tuple[Program, Program]:
    """Compile the step of `task` our way and by hand; count what both do."""
    tx = optax.adamw(1e-3)
    optimizer = rep.wrap_optimizer(tx)
    ours = rep.compile(replicator_step(task, optimizer))
    by_hand = hand_written_step(task, tx, rep.mesh)
    return (
        _counted(ours.lower(rep.init(replicator_init(task, optimizer)), task.batch)),
        _counted(by_hand.lower(hand_written_state(task, tx, rep.mesh), task.batch)),
    )


def time_loops(
    task: Task, rep: replicator.Replicator, *, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Time `rep.run` and, twice, the loop by hand, on the same task."""
    tx = optax.adamw(1e-3)
    optimizer = rep.wrap_optimizer(tx)
    # Two programs of the same code, so that none finds its own still in the caches.
    by_hand = {
        name: OwnLoop(
            hand_written_step(task, tx, rep.mesh, norm=True),
            hand_written_state(task, tx, rep.mesh),
            itertools.repeat(task.batch),
            sharding=split_over_replicas(rep.mesh),
        )
        for name in ("by hand", "by hand again")
    }

    def run(hook: Hook) -> None:
        rep.run(
            replicator_step(task, optimizer),
            [task.batch],
            init_fn=replicator_init(task, optimizer),
            steps=(rounds + 1) * steps,
            hooks=[hook],
            # While others have their turn it may read ahead no more than this.
            inputs=replicator.InputOptions(prefetch=2),
            display=False,
        )

    others = {name: _block(loop, steps) for name, loop in by_hand.items()}
    return time_run_against(run, others, steps_per_block=steps)


def time_own_loops(
    task: Task, rep: replicator.Replicator, *, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Time a loop of one's own around our step, and the same by hand."""
    tx = optax.adamw(1e-3)
    optimizer = rep.wrap_optimizer(tx)
    steps_and_states = {
        OURS: (
            rep.compile(replicator_step(task, optimizer)),
            rep.init(replicator_init(task, optimizer)),
        ),
        "by hand": (
            hand_written_step(task, tx, rep.mesh),
            hand_written_state(task, tx, rep.mesh),
        ),
    }
    sharding = split_over_replicas(rep.mesh)
    loops = {
        name: OwnLoop(step, state, itertools.repeat(task.batch), sharding=sharding)
        for name, (step, state) in steps_and_states.items()
    }
    blocks = {name: _block(loop, steps) for name, loop in loops.items()}
    return time_rounds(blocks, rounds=rounds)


def time_empty_steps(*, rounds: int, steps: int, leaves: int) -> dict[str, list[float]]:
    """Time `rep.run` and a bare jitted loop, on one device with a step that counts."""
    rep = replicator.Replicator(num_replicas=1)
    batch = {"x": np.zeros(8, np.float32)}

    def init_fn(key: jax.Array) -> PyTree:
        return [jnp.zeros((), jnp.int32) for _ in range(leaves)]

    def step_fn(counts: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        return [count + 1 for count in counts], {"x": batch["x"].sum()}

    bare = OwnLoop(
        jax.jit(step_fn, donate_argnums=0),
        init_fn(jax.random.key(0)),
        itertools.repeat(batch),
    )

    def run(hook: Hook) -> None:
        rep.run(
            step_fn,
            [batch],
            init_fn=init_fn,
            steps=(rounds + 1) * steps,
            hooks=[hook],
            display=False,
        )

    return time_run_against(run, {"bare": _block(bare, steps)}, steps_per_block=steps)


def checksum_us(rounds: int, *, leaves: int = 6, nbytes: int = 38_000_000) -> Estimate:
    """Estimate the microseconds for the checksum of a batch, out of the caches."""
    batches = [
        [np.full(nbytes, number, np.uint8) for _ in range(leaves)]
        for number in range(2)
    ]

    def take(number: int) -> None:
        checksum(batches[number])

    blocks = {name: partial(take, number) for number, name in enumerate("ab")}
    return estimate(np.multiply(time_rounds(blocks, rounds=rounds)["a"], 1e6))


def overhead_us(times_s: dict[str, list[float]], steps: int) -> Estimate:
    """Estimate the microseconds that a step takes longer in a run."""
    more_s = np.subtract(times_s[OURS], times_s["bare"])
    return estimate(more_s / steps * 1e6)


def overhead_ratio(times_s: dict[str, list[float]]) -> Estimate:
    """Estimate how many bare calls the host could make in what a run adds to one."""
    more_s = np.subtract(times_s[OURS], times_s["bare"])
    return ratio(list(more_s), times_s["bare"])


def is_same(ours: Program, by_hand: Program) -> bool:
    """Return whether both programs do the same.

    How many arrays share a collective after XLA is XLA's choice, so there bytes count.
    """
    grouped = [
        dataclasses.replace(program.compiled, collectives=0)
        for program in (ours, by_hand)
    ]
    return ours.lowered == by_hand.lowered and grouped[0] == grouped[1]


def _counted(lowered: jax.stages.Lowered) -> Program:
    return Program(
        lowered=lowered_operations(lowered),
        compiled=compiled_operations(lowered.compile()),
    )


def _block(loop: OwnLoop, steps: int) -> Callable[[], None]:
    return lambda: loop.run(steps)


def _table(programs: dict[str, tuple[Program, Program]]) -> Table:
    names = [field.name for field in dataclasses.fields(Operations)]
    table = Table("program", "stage", *names)
    for task, pair in programs.items():
        for maker, program in zip(("replicator", "by hand"), pair, strict=True):
            for stage in ("lowered", "compiled"):
                counts = dataclasses.astuple(getattr(program, stage))
                table.add_row(f"{task}, {maker}", stage, *map(str, counts))
    return table


def main(argv: list[str]) -> None:
    del argv
    replicator.fake_devices(DEVICES)
    rep = replicator.Replicator()
    programs = {
        "digits ResNet": programs_of(digits_resnet(64), rep),
        "MLP": programs_of(mlp(256), rep),
    }
    Console().print(_table(programs))

    task = digits_resnet(64, width=_WIDTH.value)
    loops = time_loops(task, rep, rounds=_ROUNDS.value, steps=_STEPS.value)
    ours = ratio(loops[OURS], loops["by hand"])
    itself = ratio(loops["by hand again"], loops["by hand"])
    step_ms = estimate(loops["by hand"]).median / _STEPS.value * 1e3
    print(f"run / by hand {ours}, by hand / itself {itself}, {step_ms:.1f} ms a step")

    own = time_own_loops(task, rep, rounds=_ROUNDS.value, steps=_STEPS.value)
    bare = ratio(own[OURS], own["by hand"])
    print(f"a loop of one's own / by hand {bare}")

    rounds, steps = _ROUNDS.value, _EMPTY_STEPS.value
    empty = time_empty_steps(rounds=rounds, steps=steps, leaves=1)
    overhead = overhead_us(empty, steps)
    print(f"an empty step takes {overhead} µs longer in a run than in a bare loop")
    large = time_empty_steps(rounds=rounds, steps=steps // 4, leaves=_LEAVES)
    more = overhead_ratio(large)
    call_us = estimate(large["bare"]).median / (steps // 4) * 1e6
    print(f"of {_LEAVES} arrays, {more} times the bare call of {call_us:.0f} µs longer")
    sampled = checksum_us(rounds)
    print(f"the checksum of a batch takes the input thread {sampled} µs")
    result = {
        "same_program": int(all(is_same(*pair) for pair in programs.values())),
        "ratio": round(ours.median, 4),
        "ratio_low": round(ours.low, 4),
        "ratio_high": round(ours.high, 4),
        "aa_ratio": round(itself.median, 4),
        "aa_ratio_low": round(itself.low, 4),
        "aa_ratio_high": round(itself.high, 4),
        "step_ms": round(step_ms, 1),
        "bare_ratio": round(bare.median, 4),
        "bare_ratio_low": round(bare.low, 4),
        "overhead_us": round(overhead.median, 1),
        "overhead_ratio": round(more.median, 2),
        "checksum_us": round(sampled.median, 1),
        "bare_call_us": round(call_us, 1),
        "devices": DEVICES,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
