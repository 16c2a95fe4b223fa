"""A run keeps its best checkpoints: by a metric of the step, or of an evaluation."""

import jax.numpy as jnp
import pytest

import replicator
from replicator.checkpoint import CheckpointStore
from replicator.errors import ArgumentError
from replicator.hooks import StateCallback, every
from replicator.training.options import Retention
from tests.steps import replicas

LOSSES = [5.0, 3.0, 1.0, 2.0, 4.0, 6.0]
"""Of the steps in order: the third is the best."""


@pytest.fixture(autouse=True)
def _every_save_is_made(monkeypatch):
    """Have each save wait for the one before, which it would otherwise give way to."""
    save_nowait = CheckpointStore.save_nowait

    def save(store, snapshot):
        store.wait()
        return save_nowait(store, snapshot)

    monkeypatch.setattr(CheckpointStore, "save_nowait", save)


def step_fn(state, batch):
    loss = replicator.all_reduce(batch["x"].mean())
    return {"steps": state["steps"] + 1}, {"loss": loss, "all": {"gain": -loss}}


def run(folder, retention, **options):
    options = {"steps": len(LOSSES), "checkpoint_every": 1} | options
    return replicas(2).run(
        step_fn,
        [{"x": jnp.full((2,), loss)} for loss in LOSSES],
        init_fn=lambda key: {"steps": jnp.zeros(())},
        checkpoint_dir=folder,
        retention=retention,
        display=False,
        **options,
    )


@pytest.mark.parametrize("on_nonfinite", ["raise", "ignore"])
@pytest.mark.parametrize(("metric", "goal"), [("loss", "min"), ("all/gain", "max")])
def test_the_best_by_a_metric_of_the_step_stay(tmp_path, metric, goal, on_nonfinite):
    best = Retention(keep_last=1, keep_best=2, metric=metric, goal=goal)
    run(tmp_path, best, on_nonfinite=on_nonfinite)
    store = CheckpointStore(tmp_path, retention=best)
    assert store.steps() == (3, 4, 6)
    assert store.best == 3
    assert store.restore(step=3).metrics == {"loss": 1.0, "all/gain": -1.0}


def test_the_metrics_are_those_of_the_last_step_of_a_call(tmp_path):
    best = Retention(keep_last=1, keep_best=1, metric="loss")
    run(tmp_path, best, steps_per_call=2)
    store = CheckpointStore(tmp_path, retention=best)
    assert store.steps() == (4, 6)
    assert store.restore(step=4).metrics["loss"] == 2.0


def test_the_best_is_remembered_by_a_run_that_goes_on(tmp_path):
    best = Retention(keep_last=1, keep_best=1, metric="loss")

    def cut(event):
        raise InterruptedError(event.step)

    with pytest.raises(InterruptedError):
        run(tmp_path, best, hooks=[StateCallback(cut, every(n_steps=5))])
    run(tmp_path, best)
    assert CheckpointStore(tmp_path).steps() == (3, 6)


def test_the_best_by_an_evaluation_stays(tmp_path):
    best = Retention(keep_last=1, keep_best=1, metric="eval/distance")
    result = run(
        tmp_path,
        best,
        eval_fn=lambda state, batch: {"distance": abs(batch["x"] - state["steps"])},
        eval_dataset=[{"x": jnp.full((2,), 4.0)}],
        eval_every=2,
    )
    store = CheckpointStore(tmp_path, retention=best)
    assert store.steps() == (4, 6)
    assert store.restore(step=4).metrics["eval/distance"] == 0.0
    assert store.restore(step=6).metrics["eval/distance"] == 2.0
    assert result.evaluation["distance"] == 2.0


def test_an_evaluation_counts_for_the_step_that_it_was_made_after(tmp_path):
    every_step = Retention(keep_last=9, metric="eval/distance")
    run(
        tmp_path,
        every_step,
        eval_fn=lambda state, batch: {"distance": abs(batch["x"] - state["steps"])},
        eval_dataset=[{"x": jnp.full((2,), 4.0)}],
        eval_every=2,
    )
    store = CheckpointStore(tmp_path)
    measured = [
        step
        for step in store.steps()
        if "eval/distance" in store.restore(step=step).metrics
    ]
    assert measured == [2, 4, 6]


@pytest.mark.parametrize("metric", ["lost", "eval/loss"])
def test_a_number_that_is_nowhere_is_refused_at_the_first_step(tmp_path, metric):
    seen = []
    hooks = [StateCallback(lambda event: seen.append(event.step), every(n_steps=1))]
    with pytest.raises(ArgumentError, match=r"`metric` must be a number of the step"):
        run(tmp_path, Retention(keep_best=1, metric=metric), hooks=hooks)
    assert seen == [1]


def test_a_number_that_no_evaluation_finds_is_refused_at_the_first(tmp_path):
    with pytest.raises(ArgumentError, match=r"got 'eval/lost' and 'eval/distance', "):
        run(
            tmp_path,
            Retention(keep_best=1, metric="eval/lost"),
            eval_fn=lambda state, batch: {"distance": batch["x"]},
            eval_dataset=[{"x": jnp.full((2,), 4.0)}],
            eval_every=2,
        )
