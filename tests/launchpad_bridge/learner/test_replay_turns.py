"""A learner on a replay table of turns gives the same bits, over kills and restarts."""

import jax
import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from tests.launchpad_bridge.learner import replay_turns
from tests.steps import assert_equal_bits

TIMEOUT_S = 240.0


def learnt(folder, launcher="threads", **options):
    program = replay_turns.program_of(folder, **options)
    with lp.launch(program, launcher) as run:
        run.wait(TIMEOUT_S, labels=["learner"])
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
    result = learnt(tmp_path, node=True)
    assert_equal_bits(result["variables"], whole["variables"])


def test_a_learner_that_goes_on_from_its_checkpoint_gives_the_same_bits(
    whole, tmp_path
):
    options = {"checkpoint_dir": tmp_path / "checkpoints", "node": True}
    learnt(tmp_path, steps=5, **options)
    result = learnt(tmp_path, **options)
    assert_equal_bits(result["variables"], whole["variables"])
    assert result["statistics"]["table"]["taken"] >= 9 * replay_turns.BATCH


def test_priorities_matter(whole, tmp_path):
    result = learnt(tmp_path, table={"sampler": lp.prioritised(0.0)})
    with pytest.raises(AssertionError):
        assert_equal_bits(result["variables"], whole["variables"])


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


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"table": {"priority_lag": 3}}, "of the table, 3, got 2"),
        ({"table": {"sampler": lp.uniform()}}, "of the table, None, got 2"),
        ({"priorities": None, "priority_lag": None}, "of the table, 2, got None"),
    ],
)
def test_another_priority_lag_than_the_tables_is_refused(tmp_path, options, found):
    with pytest.raises(lp.NodeFailedError, match=f"`priority_lag` .* {found}"):
        learnt(tmp_path, **options)


def test_uniform_samples_need_no_priorities(tmp_path):
    def step_fn(state, batch):
        return replay_turns.learning.step_fn(state, batch["trajectories"])

    without = {"priorities": None, "priority_lag": None, "step_fn": step_fn}
    table = {"sampler": lp.uniform()}
    one = learnt(tmp_path / "one", table=table, **without)
    other = learnt(tmp_path / "other", table=table, **without, node=True)
    assert_equal_bits(one["variables"], other["variables"])
    assert np.isfinite(jax.tree.leaves(one["variables"])[0]).all()
