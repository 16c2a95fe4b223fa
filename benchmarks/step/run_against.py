"""Time `rep.run` itself, with the blocks of other loops taking turns inside it.

A hook stops the run every so many steps, waits until the devices are idle, and lets the
others have their block. So what is timed is the loop that users run, whole: its input
thread, its checks, its reports.
"""

from collections.abc import Callable, Mapping

import jax

from benchmarks.timing import seconds
from replicator.base.host.clock import Clock, SystemClock
from replicator.hooks import Hook, StateEvent

OURS = "replicator"


def time_run_against(
    run: Callable[[Hook], object],
    others: Mapping[str, Callable[[], None]],
    *,
    steps_per_block: int,
    clock: Clock | None = None,
) -> dict[str, list[float]]:
    """Time blocks of a run and blocks of others, in turn, in one process.

    Args:
      run: Calls `rep.run(..., hooks=[hook])`; its first block warms up. While others
        have their turn, its input thread fills its queue: `prefetch` batches that the
        next block finds ready.
      others: By name; each makes as many steps, and waits until they are done.
      steps_per_block: Steps of the run in one block.
      clock: Where the time comes from.

    Returns:
      By name, the seconds of each round; the run's name is `OURS`.
    """
    turns = _Turns(others, steps_per_block, clock or SystemClock())
    run(turns)
    return turns.times_s


class _Turns(Hook):
    """Ends our block at each multiple of its steps, and runs the others' blocks."""

    def __init__(
        self,
        others: Mapping[str, Callable[[], None]],
        steps_per_block: int,
        clock: Clock,
    ) -> None:
        self.times_s: dict[str, list[float]] = {name: [] for name in (OURS, *others)}
        self._others = others
        self._order = list(others)
        self._steps_per_block = steps_per_block
        self._clock = clock
        self._started_s: float | None = None

    def on_state(self, event: StateEvent) -> None:
        if event.step % self._steps_per_block:
            return
        jax.block_until_ready(event.state)
        is_warm = self._started_s is not None
        if self._started_s is not None:
            self.times_s[OURS].append(self._clock.now_s() - self._started_s)
        # Who comes right after us has our input thread still filling its queue.
        self._order = [*self._order[1:], self._order[0]] if self._order else []
        for name in self._order:
            time_s = seconds(self._others[name], self._clock)
            if is_warm:
                self.times_s[name].append(time_s)
        self._started_s = self._clock.now_s()
