"""What a run's checkpoint says of the run, besides its state."""

import jax
import numpy as np
import optax

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
