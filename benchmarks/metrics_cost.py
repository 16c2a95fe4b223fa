"""Time training that writes all its numbers at every step, against none at all.

Three runs of the same task take turns in one process, a block of steps each: one with
`directory=` and `write_every=1` (JSON lines, TensorBoard, rates, memory, time by phase,
the journal), and two without, whose ratio says how much of the first one is chance.
"""

import json
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import optax
from absl import app, flags

import replicator
from benchmarks.step.step_pair import replicator_init, replicator_step
from benchmarks.tasks import digits_resnet, mlp
from benchmarks.timing import ratio
from replicator.base.host.clock import Clock, SystemClock
from replicator.hooks import Hook, StateEvent

_TASK = flags.DEFINE_enum("task", "digits_resnet", ["digits_resnet", "mlp"], "Model.")
_DEVICES = flags.DEFINE_integer("fake_devices", 2, "Devices.")
_ROUNDS = flags.DEFINE_integer("rounds", 30, "Interleaved blocks of each run.")
_BLOCK = flags.DEFINE_integer("steps_per_block", 40, "Steps of one block.")
_TURN_S = 600.0


class Turns(Hook):
    """Times blocks of a run; between two of them the other runs have theirs.

    Args:
      mine: Given when this run may go on.
      following: Given to whoever is next.
      steps_per_block: Steps of a block.
      clock: Where the time comes from.
    """

    def __init__(
        self,
        mine: threading.Semaphore,
        following: threading.Semaphore,
        *,
        steps_per_block: int,
        clock: Clock,
    ) -> None:
        self.times_s: list[float] = []
        self._mine = mine
        self._following = following
        self._steps_per_block = steps_per_block
        self._clock = clock
        self._started_s: float | None = None

    def on_state(self, event: StateEvent) -> None:
        """At the end of a block, let the others have theirs; the first warms up."""
        if event.step % self._steps_per_block:
            return
        jax.block_until_ready(event.state)
        if self._started_s is not None:
            self.times_s.append(self._clock.now_s() - self._started_s)
        self._following.release()
        self._wait()
        self._started_s = self._clock.now_s()

    def close(self) -> None:
        """Let the others go on without this run."""
        self._following.release()

    def _wait(self) -> None:
        if not self._mine.acquire(timeout=_TURN_S):
            raise TimeoutError(f"the runs before this one took over {_TURN_S:.0f} s")


def time_in_turn(
    runs: Mapping[str, Callable[[Hook], object]],
    *,
    steps_per_block: int,
    clock: Clock | None = None,
) -> dict[str, list[float]]:
    """Time several runs in one process; at any moment one of them runs.

    Args:
      runs: By name; each calls `rep.run(..., hooks=[hook])`, all for as many steps.
      steps_per_block: Steps that one makes before the next has its turn.
      clock: Where the time comes from.

    Returns:
      By name, the seconds of each round but the first.
    """
    gates = [threading.Semaphore(0) for _ in runs]
    hooks = [
        Turns(
            mine,
            following,
            steps_per_block=steps_per_block,
            clock=clock or SystemClock(),
        )
        for mine, following in zip(gates, [*gates[1:], gates[0]], strict=True)
    ]

    def start(run: Callable[[Hook], object], hook: Turns, gate: threading.Semaphore):
        gate.acquire(timeout=_TURN_S)
        run(hook)

    with ThreadPoolExecutor(len(runs)) as threads:
        done = [
            threads.submit(start, run, hook, gate)
            for run, hook, gate in zip(runs.values(), hooks, gates, strict=True)
        ]
        gates[0].release()
        for each in done:
            each.result()
    return {name: hook.times_s for name, hook in zip(runs, hooks, strict=True)}


def run_with(**options: object) -> Callable[[Hook], object]:
    """Return what trains the task, with these options of `run`."""
    rep = replicator.Replicator()
    task = digits_resnet(64) if _TASK.value == "digits_resnet" else mlp(512)
    optimizer = rep.wrap_optimizer(optax.adam(1e-3))

    def run(hook: Hook) -> object:
        return rep.run(
            replicator_step(task, optimizer),
            [task.batch],
            init_fn=replicator_init(task, optimizer),
            steps=_BLOCK.value * (_ROUNDS.value + 1),
            hooks=[hook],
            display=False,
            **options,  # pyright: ignore[reportArgumentType]
        )

    return run


def main(argv: list[str]) -> None:
    del argv
    replicator.fake_devices(_DEVICES.value)
    with tempfile.TemporaryDirectory() as directory:
        times_s = time_in_turn(
            {
                "all": run_with(directory=directory, write_every=1),
                "none": run_with(),
                "none again": run_with(),
            },
            steps_per_block=_BLOCK.value,
        )
    cost = ratio(times_s["all"], times_s["none"])
    chance = ratio(times_s["none again"], times_s["none"])
    step_ms = 1e3 * sum(times_s["none"]) / len(times_s["none"]) / _BLOCK.value
    print(f"{_TASK.value}, {_DEVICES.value} devices, steps of {step_ms:.2f} ms")
    print(f"  all metrics at every step / none  {cost}")
    print(f"  none / none                       {chance}")
    result = {
        "ratio_low": round(cost.low, 4),
        "ratio": round(cost.median, 4),
        "ratio_high": round(cost.high, 4),
        "same_low": round(chance.low, 4),
        "same_high": round(chance.high, 4),
        "step_ms": round(step_ms, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
