"""A run whose saves copy its state to the host: the same bits, and a record of it."""

import json

import jax
import numpy as np
import pytest

from replicator.errors import ArgumentError
from replicator.monitoring.events import read_events
from tests.steps import adam, regression_batch, replicas, trainer


def train(folder, steps, **options):
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(adam()))
    result = rep.run(
        step_fn,
        [regression_batch()],
        init_fn=init_fn,
        steps=steps,
        directory=folder / "records",
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every=2,
        display=False,
        **options,
    )
    return jax.tree.map(np.asarray, jax.tree.leaves(result.state))


def test_a_run_resumes_from_copies_on_the_host_with_the_same_bits(tmp_path):
    train(tmp_path / "a", 3, checkpoint_copy="host")
    resumed = train(tmp_path / "a", 6, checkpoint_copy="host")
    whole = train(tmp_path / "b", 6)
    assert all(map(np.array_equal, resumed, whole))
    saved = [e for e in read_events(tmp_path / "a/records") if e["kind"] == "saved"]
    assert {event["copy"] for event in saved} == {"host"}
    record = json.loads((tmp_path / "a/records/run.json").read_text())
    assert record["arguments"]["checkpoint_copy"] == "host"


def test_another_place_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ArgumentError, match="`checkpoint_copy` must be one of 'dev"):
        train(tmp_path, 1, checkpoint_copy="disk")
