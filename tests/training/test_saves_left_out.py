"""A save that comes while another is written is left out, and told; the best is not."""

import threading

import jax.numpy as jnp
import pytest

import replicator
from replicator.checkpoint import CheckpointStore
from replicator.checkpoint.disk import Disk
from replicator.hooks import Hook
from replicator.monitoring.events import read_events
from replicator.training.options import Follow, Retention
from tests.steps import replicas

STEPS = 6


class Slow(Hook):
    """Brings a disk that takes longer for the first checkpoint than all steps do."""

    def __init__(self):
        self.disk = SlowDisk()


class SlowDisk(Disk):
    takes_s = 0.3

    def write_file(self, path, content):
        threading.Event().wait(self.takes_s)
        self.takes_s = 0.0
        super().write_file(path, content)


def step_fn(state, batch):
    loss = replicator.all_reduce(batch["x"].mean())
    return {"steps": state["steps"] + 1}, {"loss": loss}


def run(folder, **options):
    return replicas(2).run(
        step_fn,
        [{"x": jnp.full((2,), 4.0)}],
        init_fn=lambda key: {"steps": jnp.zeros(())},
        steps=STEPS,
        hooks=[Slow()],
        directory=folder / "records",
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every=1,
        display=False,
        **options,
    )


def steps_of(folder, kind):
    events = read_events(folder / "records")
    return [event["step"] for event in events if event["kind"] == kind]


def test_the_best_by_an_evaluation_waits_for_the_save_before(tmp_path):
    best = Retention(keep_last=1, keep_best=1, metric="eval/distance")
    result = run(
        tmp_path,
        retention=best,
        eval_fn=lambda state, batch: {"distance": abs(batch["x"] - state["steps"])},
        eval_dataset=[{"x": jnp.full((2,), 2.0)}],
        eval_every=2,
        follow=Follow(metric="distance"),
    )
    assert result.best.step == 2
    assert CheckpointStore(tmp_path / "checkpoints", retention=best).best == 2
    assert 2 not in steps_of(tmp_path, "save_left_out")


@pytest.mark.parametrize("metric", [None, "loss"])
def test_each_save_is_made_or_told_to_be_left_out(tmp_path, metric):
    run(tmp_path, retention=Retention(metric=metric, keep_last=STEPS))
    saved = CheckpointStore(tmp_path / "checkpoints").steps()
    left_out = steps_of(tmp_path, "save_left_out")
    assert 2 in left_out
    assert sorted([*saved, *left_out]) == list(range(1, STEPS + 1))
