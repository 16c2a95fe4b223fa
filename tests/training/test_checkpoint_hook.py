"""What a run's checkpoint says of the run, besides its state."""

import shutil

import jax
import numpy as np
import optax
import pytest

import replicator
from replicator.checkpoint import CheckpointStore
from tests.steps import regression_batch, replicas, trainer


def test_a_checkpoint_says_how_and_by_what_it_was_computed(tmp_path):
    rep = replicas(2, reduction="ordered")
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    rep.run(
        step_fn,
        [regression_batch()],
        init_fn=init_fn,
        steps=2,
        checkpoint_dir=tmp_path,
        display=False,
    )
    meta = CheckpointStore(tmp_path).restore().meta
    assert meta["strategy"] == {
        "engine": "replicates",
        "mesh": {"replica": 2},
        "reduction": "ordered",
    }
    assert meta["versions"]["jax"] == jax.__version__
    assert meta["versions"]["replicator"] == replicator.__version__


def test_a_run_may_begin_with_a_part_of_another(tmp_path):
    rep = replicas(2)
    init_fn, step_fn = trainer(
        optimizer := rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9))
    )

    def run(init_fn, folder, seed):
        return rep.run(
            step_fn,
            [regression_batch()],
            init_fn=init_fn,
            steps=3,
            seed=seed,
            checkpoint_dir=folder,
            display=False,
        ).state["params"]

    before = run(init_fn, tmp_path / "first", 0)
    body = CheckpointStore(tmp_path / "first").restore().arrays["user"]["params"]["w1"]
    np.testing.assert_array_equal(body, before["w1"])

    def init_from(key):
        params = init_fn(key)["params"] | {"w1": body}
        return {"params": params, "opt": optimizer.init(params)}

    born = rep.init(init_from, seed=1)["params"]
    np.testing.assert_array_equal(born["w1"], before["w1"])
    assert not np.array_equal(born["w2"], before["w2"])
    after = run(init_from, tmp_path / "second", 1)
    assert not np.array_equal(after["w1"], before["w1"])


def go_on(folder, *, steps=2, n=1, reduction="fast", **options):
    rep = replicas(n, reduction=reduction)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    options = {"init_fn": init_fn, "checkpoint_dir": folder, "display": False} | options
    rep.run(step_fn, [regression_batch()], steps=steps, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    go_on(folder := tmp_path_factory.mktemp("saved"))
    return folder


CHANGED = [
    ({}, None),
    ({"steps": 4}, "another `steps` 4 (it was 2)."),
    ({"accumulate": 2}, "another `accumulate` 2 (it was 1)."),
    ({"steps_per_call": 2}, "another `steps_per_call` 2 (it was 1)."),
    ({"n": 2}, 'another `strategy.mesh` {"replica": 2} (it was {"replica": 1}).'),
    ({"reduction": "ordered"}, 'another `strategy.reduction` "ordered" (it was "fast"'),
    ({"seed": 1}, "`seed` is 1, and was 0 when the run was saved"),
    ({"steps": 4, "accumulate": 2}, "another `accumulate` 2 (it was 1), `steps` 4 (it"),
]


@pytest.mark.parametrize(("options", "told"), CHANGED)
def test_a_run_that_goes_on_another_way_says_which(
    saved, tmp_path, options, told, caplog
):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    go_on(tmp_path, **options)
    lines = [x for x in caplog.messages if "The run goes on with" in x or "`seed`" in x]
    assert len(lines) == (told is not None)
    assert all(told in line for line in lines)
