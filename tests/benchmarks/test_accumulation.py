"""The peers of `benchmarks.accumulation` make one and the same update."""

import functools

import jax
import numpy as np
import pytest

from benchmarks.step.accumulated import (
    mean_inside_loop,
    multi_steps_loop,
    scanned_loop,
)
from benchmarks.tasks import mlp
from tests.steps import replicas


@pytest.fixture
def users_promotion():
    """Shapes and dtypes mix as JAX lets them: the benchmark is a user's program."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("make", [mean_inside_loop, multi_steps_loop])
def test_mini_steps_with_the_mean_anywhere_are_one_scan(make, users_promotion):
    task, mesh = mlp(4 * 8), replicas(8).mesh
    scan, peer = (loop(task, mesh, microbatches=4) for loop in (scanned_loop, make))
    scan.run(2)
    peer.run(2 * 4)

    one, other = scan.state["model"], peer.state["model"]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), one, other)
