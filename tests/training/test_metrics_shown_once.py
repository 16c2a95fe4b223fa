"""Hooks see the metrics of each step once, as they were, wherever a run is cut."""

import dataclasses
import os
import signal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator.errors import Preempted
from replicator.hooks import Hook
from tests.steps import errors, regression_batch, replicas, trainer


class Pair(NamedTuple):
    """A container of metrics."""

    loss: jax.Array
    rest: tuple


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    """Another."""

    loss: jax.Array


def ramp(step, *shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + np.float32(step)


FORMS = {
    "dict": lambda step: {"loss": ramp(step)},
    "bare": lambda step: ramp(step),
    "none": lambda step: {},
    "two axes": lambda step: {"grid": ramp(step, 3, 2)},
    "images": lambda step: {"drawn": ramp(step, 2, 4, 4, 3)},
    "many numbers": lambda step: {"histogram": ramp(step, 10_001)},
    "tuple": lambda step: (ramp(step), ramp(step, 2)),
    "named tuple": lambda step: Pair(ramp(step), ({"inner": ramp(step, 1, 2)},)),
    "dataclass": lambda step: {"all": Record(ramp(step))},
    "another each step": lambda step: {f"of {step}": ramp(step)},
    "on devices": lambda step: Pair(jnp.asarray(ramp(step, 2, 2)), ()),
    "half": lambda step: {"loss": jnp.asarray(ramp(step), jnp.bfloat16)},
    "complex": lambda step: {"spectrum": ramp(step, 2) * 1j},
}


class Cut(Exception):
    """What cuts a run short."""


class Note(Hook):
    """Note what is shown; cut the run behind a step, or stop it by a metric."""

    def __init__(self, *, cut_at=None, stop_at=None):
        self.shown, self.ends = [], []
        self._cut_at, self._stop_at, self._stops = cut_at, stop_at, False

    @property
    def should_stop(self):
        return self._stops

    def on_metrics(self, event):
        self.shown.append((event.step, event.metrics))
        self._stops = event.step == self._stop_at

    def on_state(self, event):
        if event.step == self._cut_at:
            raise Cut

    def on_end(self, event):
        self.ends.append(event.step)

    def state_dict(self):
        return {"stops": self._stops}

    def load_state(self, state):
        self._stops = state["stops"]


def go(folder, note, metrics_of=FORMS["dict"], *, steps=5, every=2):
    with replicas(1).session(
        init_fn=lambda key: {"w": jnp.zeros(2)},
        steps=steps,
        hooks=[note],
        checkpoint_dir=folder,
        checkpoint_every=every,
        display=False,
    ) as session:
        for step in session.steps():
            session.after(metrics_of(step))
    return session.result


def words(shown):
    return [
        (step, jax.tree.structure(tree), [x.dtype for x in jax.tree.leaves(tree)])
        for step, tree in shown
    ]


def assert_same(found, expected):
    assert words(found) == words(expected)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("form", FORMS)
def test_a_cut_run_shows_each_step_once_as_it_was(tmp_path, form):
    whole, cut, found = Note(), Note(cut_at=3), Note()
    go(None, whole, FORMS[form])
    with pytest.raises(Cut):
        go(tmp_path / "cut", cut, FORMS[form])
    go(tmp_path / "cut", found, FORMS[form])
    assert [step for step, _ in found.shown] == [3, 4, 5]
    assert_same([*cut.shown, *found.shown], whole.shown)


def test_declared_metrics_of_a_cut_run_are_shown_once_as_they_were(tmp_path):
    rep = replicas(2)
    init_fn, train = trainer(rep.wrap_optimizer(optax.sgd(0.1)))

    def step_fn(state, batch):
        after, metrics = train(state, batch)
        rows = replicator.Concat(errors(state["params"], batch))
        most = replicator.Max(jnp.abs(batch["x"]).max(0)[:, None])
        return after, Pair(metrics["loss"], (rows, {"most": most}))

    def run(note, folder):
        rep.run(
            step_fn,
            [regression_batch(seed=seed) for seed in range(5)],
            init_fn=init_fn,
            steps=5,
            hooks=[note],
            checkpoint_dir=tmp_path / folder,
            checkpoint_every=2,
            display=False,
        )

    whole, cut, found = Note(), Note(cut_at=3), Note()
    run(whole, "whole")
    with pytest.raises(Cut):
        run(cut, "cut")
    run(found, "cut")
    assert_same([*cut.shown, *found.shown], whole.shown)


@pytest.mark.parametrize("every", [1, 2, 9])
def test_where_a_run_is_saved_does_not_move_where_a_hook_stops_it(tmp_path, every):
    assert go(tmp_path, Note(stop_at=2), every=every).step == 3


def test_a_run_cut_before_it_stops_by_a_metric_stops_at_the_same_step(tmp_path):
    with pytest.raises(Cut):
        go(tmp_path, Note(cut_at=3, stop_at=2))
    stopping = Note(stop_at=2)
    assert (go(tmp_path, stopping).step, stopping.ends) == (3, [3])


class StopsAsked(Note):
    """Stops the run by its state, at a step at which it is asked to leave, too."""

    def on_state(self, event):
        if event.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            self._stops = True

    def on_metrics(self, event):
        pass


def test_a_run_that_stops_where_it_is_asked_to_leave_has_ended(tmp_path):
    asked, again = StopsAsked(), StopsAsked()
    with pytest.raises(Preempted):
        go(tmp_path, asked)
    assert (go(tmp_path, again).step, asked.ends, again.ends) == (2, [2], [])


def test_a_run_cut_at_what_is_now_its_last_step_comes_to_its_end(tmp_path):
    with pytest.raises(Cut):
        go(tmp_path, Note(cut_at=3))
    ending = Note()
    result = go(tmp_path, ending, steps=2)
    assert (ending.shown, ending.ends) == ([], [2])
    assert (result.step, result.metrics) == (2, {"loss": 2.0})
    again = Note()
    assert (go(tmp_path, again, steps=2).metrics, again.ends) == ({"loss": 2.0}, [])
