"""A learner on a replay table of turns gives the same bits, over kills and restarts."""

import functools
import os
import signal

import jax
import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.hooks import Hook
from replicator.launchpad_bridge.acting import from_gymnasium_envs, n_step
from tests.launchpad_bridge.acting.counter import GoesBack
from tests.launchpad_bridge.learner import learning, replay_turns
from tests.steps import assert_equal_bits

pytestmark = pytest.mark.slow
TIMEOUT_S = 240.0


def learnt(folder, launcher="threads", **options):
    program = replay_turns.program_of(folder, **options)
    with lp.launch(program, launcher) as run:
        run.wait(TIMEOUT_S, labels=["learner"])
        if options.get("restart"):
            killed = {name: state.attempt for name, state in run.workers.items()}
            assert killed == {"replay": 1, "learner": 1, "actor/0": 0, "actor/1": 1}
        return run.results_of("learner")[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return learnt(tmp_path_factory.mktemp("whole"))


def test_it_learns_from_samples_of_what_actors_insert(whole):
    assert whole["step"] == 9
    counts = whole["statistics"]["table"]
    assert counts["inserted"] >= (3 + 9 - 1) * 4
    assert counts["updated"] > 0
    assert whole["statistics"]["priorities"]["nonfinite"] > 0


def test_a_table_that_is_a_node_gives_the_same_bits(whole, tmp_path):
    result = learnt(tmp_path, node=lp.ReplayTurns)
    assert_equal_bits(result["variables"], whole["variables"])


def test_a_learner_that_goes_on_from_its_checkpoint_gives_the_same_bits(
    whole, tmp_path
):
    options = {"checkpoint_dir": tmp_path / "checkpoints", "node": lp.ReplayTurns}
    learnt(tmp_path, steps=5, **options)
    result = learnt(tmp_path, **options)
    assert_equal_bits(result["variables"], whole["variables"])
    assert result["statistics"]["table"]["taken"] >= 9 * replay_turns.BATCH


def test_replicas_and_microbatches_keep_priorities_in_the_order_of_the_batch(tmp_path):
    cut = {"replicas": 2, "accumulate": 2}
    one = learnt(tmp_path / "one", **cut)
    options = {"checkpoint_dir": tmp_path / "checkpoints", **cut}
    learnt(tmp_path / "other", steps=5, **options)
    other = learnt(tmp_path / "other", **options)
    assert_equal_bits(one["variables"], other["variables"])


def test_a_batch_that_waits_for_the_last_one_holds_nobody_up(tmp_path):
    table = {"priority_lag": 1}
    assert learnt(tmp_path, table=table, priority_lag=1)["step"] == 9


def test_uniform_samples_need_no_priorities(tmp_path):
    def step_fn(state, batch):
        return learning.step_fn(state, batch["trajectories"])

    without = {"priorities": None, "priority_lag": None, "step_fn": step_fn}
    table = {"sampler": lp.uniform()}
    one = learnt(tmp_path / "one", table=table, **without)
    other = learnt(tmp_path / "other", table=table, **without, node=lp.ReplayTurns)
    assert_equal_bits(one["variables"], other["variables"])
    assert np.isfinite(jax.tree.leaves(one["variables"])[0]).all()


def die_once():
    if lp.context.get_context().attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)


class DyingTable(lp.ReplayTurns):
    """Dies with the fourth sample written, and not given out."""

    _left = 4

    def take(self, count, **options):
        taken = super().take(count, **options)
        self._left -= taken is not None
        if not self._left:
            die_once()
        return taken


class DyingLearner(Hook):
    """Dies behind its sixth update, two behind a checkpoint."""

    def on_state(self, event):
        if event.step == 6:
            die_once()


class DyingCounter(GoesBack):
    """Dies at its 15th step."""

    def __init__(self):
        super().__init__()
        self._left = 15

    def step(self, action):
        self._left -= 1
        if not self._left:
            die_once()
        return super().step(action)


def make_dying(index):
    return from_gymnasium_envs([DyingCounter if index else GoesBack] * learning.ENVS)


def all_killed(folder, **options):
    """Learn in processes, of which table, learner and an actor are killed once."""
    return learnt(
        folder,
        "processes",
        node=DyingTable,
        restart=lp.Restart(attempts=2, backoff_s=0.1),
        make=make_dying,
        hooks=[DyingLearner()],
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every=4,
        **options,
    )


def test_processes_that_are_all_killed_give_the_same_bits(whole, tmp_path):
    result = all_killed(tmp_path)
    assert_equal_bits(result["variables"], whole["variables"])


@pytest.mark.nightly
def test_two_processes_learn_what_one_does(whole, tmp_path):
    options = {"processes": 2, "replicas": 2, "devices": 1}
    two = learnt(tmp_path, "processes", node=lp.ReplayTurns, **options)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, two["variables"], whole["variables"])


ITEMS = {
    "items": n_step(3, discount=0.9),
    "table": {"rows_per_turn": 5, "new_rows_per_batch": 5},
    "step_fn": replay_turns.transitions_step_fn,
}


@pytest.fixture(scope="module")
def of_items(tmp_path_factory):
    return learnt(tmp_path_factory.mktemp("items"), **ITEMS)


def test_items_whose_number_varies_give_the_same_bits_over_kills(of_items, tmp_path):
    result = all_killed(tmp_path, **ITEMS)
    assert_equal_bits(result["variables"], of_items["variables"])


def test_items_whose_number_varies_give_the_same_bits_on_ray(of_items, tmp_path):
    pytest.importorskip("ray")
    result = learnt(tmp_path, "ray", node=lp.ReplayTurns, **ITEMS)
    assert_equal_bits(result["variables"], of_items["variables"])
