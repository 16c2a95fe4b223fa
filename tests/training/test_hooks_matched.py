"""A run that goes on with other hooks gives each the state that its own kind had."""

import jax.numpy as jnp
import pytest

from replicator.hooks import Callback, Hook
from replicator.hooks.hook_states import load_hooks
from replicator.hooks.schedule import every
from replicator.training.evaluate_hook import EvaluateEvery
from tests.steps import replicas


class Counts(Hook):
    """Counts over all runs."""

    def __init__(self):
        self.count = 0

    def on_state(self, event):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state(self, state):
        self.count = state["count"]


class Other(Counts):
    """Another kind."""


def evaluations():
    return [EvaluateEvery(lambda state: {}, every(n_steps=1))]


def go(folder, hooks, *, steps, evaluates=False):
    evaluation = {
        "eval_fn": lambda state, batch: {"x": batch["x"]},
        "eval_dataset": [{"x": jnp.ones(2)}],
        "eval_every": 1,
    }
    with replicas(1).session(
        init_fn=lambda key: {"w": jnp.zeros(2)},
        steps=steps,
        hooks=hooks,
        checkpoint_dir=folder,
        display=False,
        **(evaluation if evaluates else {}),
    ) as session:
        for _ in session.steps():
            session.after({})
    return [getattr(hook, "count", None) for hook in hooks]


CHANGES = {
    "an evaluation more": ([Counts, Other], [Counts, Other], (False, True), [4, 4]),
    "an evaluation less": ([Counts, Other], [Counts, Other], (True, False), [4, 4]),
    "another order": ([Counts, Other], [Other, Counts], (False, False), [4, 4]),
    "one before": ([Counts], [Other, Counts], (False, False), [2, 4]),
    "one less": ([Other, Counts], [Counts], (False, False), [4]),
    "two of a kind": (
        [Counts, Counts],
        [Counts, Other, Counts],
        (True, False),
        [4, 2, 4],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_hook_goes_on_with_the_state_of_its_kind(tmp_path, change):
    before, after, (had, has), counts = CHANGES[change]
    go(tmp_path, [make() for make in before], steps=2, evaluates=had)
    found = go(tmp_path, [make() for make in after], steps=4, evaluates=has)
    assert found == counts


def test_an_evaluation_of_the_runs_own_takes_no_state_of_the_users(tmp_path):
    go(tmp_path, evaluations(), steps=2)
    go(tmp_path, theirs := evaluations(), steps=2, evaluates=True)
    assert theirs[0].state_dict()["last_step"] == 2


def test_what_finds_no_partner_is_named(caplog):
    stateless = Callback(print, every(n_steps=1))
    load_hooks([Counts(), stateless], [["Other", {"count": 1}, False], ["Hook", None]])
    assert caplog.messages == [
        "The run was saved without this `Counts`: it starts anew.",
        "The run was saved with a `Other` that it now lacks: its state is lost.",
    ]


def test_a_new_run_names_nobody(caplog):
    load_hooks([Counts()], [])
    assert not caplog.messages
