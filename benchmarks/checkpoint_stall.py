"""Time a loop that saves, against the same loop that does not, and one save alone.

The state is donated from step to step, and up to four steps are in flight. A block with
a save in it and a block without take turns; `blocked_ms` is how long the loop waited in
the call that saves. One save alone, until it is durable, is set against one of plain
orbax, asynchronous and waited for.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
from absl import app, flags, logging

import replicator
from benchmarks.timing import estimate, ratio, seconds, time_rounds
from replicator.base.host.clock import SystemClock
from replicator.base.mesh import replica_mesh, replicated
from replicator.base.types import PyTree
from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.engine.run_ahead import DEFAULT_RUN_AHEAD
from replicator.training.options import Retention

_STATE_MB = flags.DEFINE_integer("state_mb", 32, "Size of the state.")
_STEP_MS = flags.DEFINE_float("step_ms", 30.0, "How long one step should take.")
_INTERVAL_S = flags.DEFINE_float("interval_s", 10.0, "Seconds from save to save.")
_ROUNDS = flags.DEFINE_integer("rounds", 6, "Interleaved blocks of each loop.")
_SAVES = flags.DEFINE_integer("saves", 12, "Saves alone, of each kind.")
_LEAVES = 32
_SIDE = 256
_MORE = 64


class Loop:
    """A training loop of its own: a state of 32 leaves, and a step as long as asked.

    Args:
      state_mb: Size of the state.
      step_ms: How long a step takes, as measured here.
    """

    def __init__(self, *, state_mb: int, step_ms: float):
        size = state_mb * 2**20 // 4 // _LEAVES
        rng = np.random.default_rng(0)
        leaves = {
            str(leaf): rng.standard_normal(size, np.float32) for leaf in range(_LEAVES)
        }
        self.state = jax.device_put(leaves, replicated(replica_mesh(1)))
        self.steps = 0
        few_ms, many_ms = self._try(products=1), self._try(products=1 + _MORE)
        product_ms = max(many_ms - few_ms, 1e-3) / _MORE
        self.step_ms = self._try(
            products=1 + max(0, round((step_ms - few_ms) / product_ms))
        )

    def run(
        self, steps: int, *, save_at: int = -1, save: Callable[[], None] | None = None
    ) -> None:
        """Make so many steps; call `save` after one of them."""
        in_flight: list[jax.Array] = []
        for number in range(steps):
            self.state, done = self._step(self.state)
            self.steps += 1
            in_flight.append(done)
            if save is not None and number == save_at:
                save()
            if len(in_flight) == DEFAULT_RUN_AHEAD:
                in_flight.pop(0).block_until_ready()
        jax.block_until_ready(self.state)

    def _try(self, *, products: int) -> float:
        """Take another step function; return how long a step takes now."""
        self._step = make_step(products=products)
        self.run(3)
        clock = SystemClock()
        return 1e3 * min(seconds(lambda: self.run(10), clock) for _ in range(3)) / 10


def make_step(*, products: int) -> Callable[[PyTree], tuple[PyTree, jax.Array]]:
    """Return a step that touches all of the state, and multiplies matrices."""

    def step(state: PyTree) -> tuple[PyTree, jax.Array]:
        start = state["0"][: _SIDE * _SIDE].reshape(_SIDE, _SIDE)
        square = jax.lax.fori_loop(0, products, lambda _, x: jnp.tanh(x @ x), start)
        moved = jax.tree.map(lambda leaf: leaf + 1e-6 * square[0, 0], state)
        return moved, square[0, 0]

    return jax.jit(step, donate_argnums=0)


def time_saving(loop: Loop, directory: Path) -> tuple[dict[str, list[float]], float]:
    """Time blocks with and without a save; also how long the saves held the loop."""
    steps = max(4, round(_INTERVAL_S.value * 1e3 / loop.step_ms))
    clock, blocked_ms = SystemClock(), []
    with CheckpointStore(directory) as store:

        def save() -> None:
            snapshot = Snapshot(step=loop.steps, arrays=loop.state)
            took_s = seconds(lambda: assert_begun(store.save_nowait(snapshot)), clock)
            blocked_ms.append(1e3 * took_s)

        times_s = time_rounds(
            {
                "saving": lambda: loop.run(steps, save_at=1, save=save),
                "plain": lambda: loop.run(steps),
            },
            rounds=_ROUNDS.value,
        )
    return times_s, max(blocked_ms)


def assert_begun(begun: bool) -> None:
    assert begun, "a save still ran after a whole interval"


def time_saves_alone(state: PyTree, directory: Path) -> dict[str, list[float]]:
    """Time saves until they are durable: ours, and plain orbax."""
    names = iter(range(10**6))
    plain = orbax.checkpoint.AsyncCheckpointer(
        orbax.checkpoint.PyTreeCheckpointHandler()
    )

    def save_plain() -> None:
        save_args = orbax.checkpoint.args.PyTreeSave(state)
        plain.save(directory / "plain" / str(next(names)), args=save_args)
        plain.wait_until_finished()

    keep_all = Retention(keep_last=10**6)  # plain orbax deletes nothing either
    with CheckpointStore(directory / "ours", retention=keep_all) as store:
        times_s = time_rounds(
            {
                "ours": lambda: store.save(Snapshot(step=next(names), arrays=state)),
                "plain": save_plain,
            },
            rounds=_SAVES.value,
        )
    plain.close()
    return times_s


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)  # orbax tells 25 lines a save
    replicator.fake_devices(1)
    loop = Loop(state_mb=_STATE_MB.value, step_ms=_STEP_MS.value)
    with tempfile.TemporaryDirectory() as folder:
        loops_s, blocked_ms = time_saving(loop, Path(folder) / "loop")
        saves_s = time_saves_alone(loop.state, Path(folder))
    slower = ratio(loops_s["saving"], loops_s["plain"])
    per_save = ratio(saves_s["ours"], saves_s["plain"])
    print(
        f"steps of {loop.step_ms:.0f} ms: with saves they take {slower} times as long"
    )
    print(f"a save takes {per_save} times as long as plain orbax")
    result = {
        "ratio": round(slower.median, 4),
        "blocked_ms": round(blocked_ms, 1),
        "seconds_per_save_ratio": round(per_save.median, 3),
        "seconds_per_save": round(estimate(saves_s["ours"]).median, 3),
        "step_ms": round(loop.step_ms, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
