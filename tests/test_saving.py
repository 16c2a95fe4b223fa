"""What a run's checkpoint says of the run, besides its state."""

import jax
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
