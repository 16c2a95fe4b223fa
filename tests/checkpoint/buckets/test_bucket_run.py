"""A run whose checkpoints are in a bucket goes on from there, bit for bit."""

import jax
import numpy as np
import optax
import pytest

from benchmarks.runs.faulty_buckets import BUCKET
from replicator.errors import BucketError
from tests.steps import regression_batch, replicas, trainer


def run(place, steps):
    """Train from where the last run in that place ended."""
    rep = replicas(2, reduction="ordered")
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))
    batches = [regression_batch(seed=seed) for seed in range(6)]
    return rep.run(
        step_fn,
        batches,
        init_fn=init_fn,
        steps=steps,
        checkpoint_dir=place,
        checkpoint_every=2,
        display=False,
    )


@pytest.mark.slow
def test_a_run_goes_on_from_its_bucket(s3, tmp_path):
    place = f"s3://{BUCKET}/training"
    run(place, 3)
    ended = run(place, 6)
    whole = run(tmp_path, 6)
    jax.tree.map(np.testing.assert_array_equal, ended.state, whole.state)


def test_a_run_without_rights_ends_before_its_first_step(s3):
    s3.disturb = lambda method, path: "403"
    with pytest.raises(BucketError, match="must be open to this process"):
        run(f"s3://{BUCKET}/forbidden", 3)
