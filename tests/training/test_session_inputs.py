"""Which batch a step of a session got: what is left out, and what is written down."""

import numpy as np
import optax
import pytest

from replicator import InputOptions
from replicator.errors import NonFiniteError
from replicator.monitoring.events import read_events
from replicator.training.postmortem.bundle import read_bundle
from tests.steps import regression_batch, replicas, trainer

BATCHES = [regression_batch(seed=seed) for seed in range(8)]
BAD = BATCHES[3] | {"y": np.full(16, 1e30, np.float32)}


def opened(dataset, *, steps=6, **options):
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    options = {"init_fn": init_fn, "steps": steps, "display": False} | options
    return rep.session(step_fn, dataset, **options)


def test_the_bad_batch_is_left_out_where_another_was_skipped(tmp_path):
    with opened(
        [*BATCHES[:3], BAD, *BATCHES[4:]],
        on_nonfinite="rollback",
        checkpoint_dir=tmp_path / "saved",
        checkpoint_every=1,
        directory=tmp_path,
    ) as session:
        for batch in session.batches():
            if batch.index > 0:
                session.step(batch)
    assert session.result.step == 6
    events = [e for e in read_events(tmp_path) if e["kind"] == "rolled_back"]
    assert [(event["step"], event["batch"]) for event in events] == [(3, 3)]


@pytest.mark.parametrize("uses", ["each", "twice", "copies"])
def test_a_bundle_holds_the_inputs_of_a_step_only_where_they_are_known(tmp_path, uses):
    def train():
        with opened([*BATCHES[:3], BAD], directory=tmp_path, steps=12) as session:
            for batch in session.batches():
                copy = {name: leaf + 0 for name, leaf in batch.value.items()}
                session.step(copy if uses == "copies" else batch)
                if uses == "twice":
                    session.step(batch)

    with pytest.raises(NonFiniteError):
        train()
    [bundle] = (tmp_path / "postmortem").iterdir()
    assert (read_bundle(bundle).batch is not None) == (uses == "each")


def test_a_batch_may_be_skipped_with_a_step_of_the_session():
    with opened(BATCHES, inputs=InputOptions(epochs=1)) as session:
        for batch in session.batches():
            if batch.index not in (1, 5):
                session.step(batch)
    assert session.result.step == 6


def test_run_reads_no_more_than_its_steps():
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    batches = iter(BATCHES)
    rep.run(step_fn, batches, init_fn=init_fn, steps=3, display=False)
    np.testing.assert_array_equal(next(batches)["x"], BATCHES[3]["x"])
