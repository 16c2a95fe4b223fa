from benchmarks.metrics_cost import time_in_turn
from replicator.hooks import StateEvent
from replicator.monitoring.progress import ProgressNumbers


def make_run(name, done, *, steps):
    """A run that notes each of its steps, and shows them to its hook."""

    def run(hook):
        for step in range(1, steps + 1):
            done.append((name, step))
            numbers = ProgressNumbers(step=step, steps=steps, time_s=0.0)
            hook.on_state(
                StateEvent(
                    step=step, advanced=1, examples=0, progress=numbers, read_state=dict
                )
            )
        hook.close()

    return run


def test_runs_take_turns_block_by_block():
    done = []
    times_s = time_in_turn(
        {name: make_run(name, done, steps=6) for name in "ab"}, steps_per_block=2
    )
    blocks = [done[start : start + 2] for start in range(0, 12, 2)]
    assert [block[0][0] for block in blocks] == ["a", "b"] * 3
    assert all(first[0] == second[0] for first, second in blocks)
    assert [len(times_s[name]) for name in "ab"] == [2, 2]
