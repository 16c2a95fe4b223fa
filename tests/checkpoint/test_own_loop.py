"""An own loop that was cut between two microbatches goes on bit for bit."""

import jax
import numpy as np
import optax
import pytest

from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.inputs import open_input
from replicator.inputs.position import position_from_json
from tests.steps import regression_batch, replicas, trainer, weighted_trainer

MICROBATCHES = 3
CALLS = 7


def microbatches():
    return [regression_batch(8, seed=seed) for seed in range(CALLS)]


def own_loop(directory, *, calls, n=4, make=trainer):
    """Run until so many microbatches are done, from wherever it was saved."""
    rep = replicas(n)
    tx = optax.sgd(0.1, momentum=0.9)
    init_fn, step_fn = make(rep.wrap_optimizer(tx, accumulate=MICROBATCHES))
    step, state = rep.compile(step_fn), rep.init(init_fn)
    done, start = 0, None
    with CheckpointStore(directory) as store:
        saved = store.restore(state)
        if saved is not None:
            state, done = saved.arrays, saved.step
            start = position_from_json(saved.meta["position"])
        with open_input(microbatches(), rep.layout, start=start) as batches:
            while done < calls:
                placed = next(batches)
                state, _ = step(state, placed)
                done += 1
                meta = {"position": placed.position.as_json()}
                if done == calls:
                    store.save(Snapshot(step=done, arrays=state, meta=meta))
    return state


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_between_microbatches_nothing_is_lost(tmp_path, cut):
    expected = own_loop(tmp_path / "whole", calls=CALLS)
    own_loop(tmp_path / "cut", calls=cut)
    assert bits(own_loop(tmp_path / "cut", calls=CALLS)) == bits(expected)


@pytest.mark.parametrize("make", [trainer, weighted_trainer])
def test_sums_of_microbatches_go_to_another_number_of_replicas(tmp_path, make):
    options = {"calls": CALLS, "make": make}
    expected = own_loop(tmp_path / "whole", **options)
    own_loop(tmp_path / "cut", **options | {"calls": 2})
    found = own_loop(tmp_path / "cut", **options, n=2)
    for one, other in zip(
        jax.tree.leaves(found["params"]),
        jax.tree.leaves(expected["params"]),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
