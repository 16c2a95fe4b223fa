"""Processes of a learner on a replay table: one answer, and priorities come back."""

import functools
import os
import signal

import jax
import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.hooks import Hook
from tests.launchpad_bridge.learner import replay

pytestmark = pytest.mark.slow


def test_two_processes_learn_from_a_sample_what_one_does():
    one, told = replay.learnt(accumulate=2)
    options = {"processes": 2, "replicas": 2, "accumulate": 2}
    two, (ids, values) = replay.learnt("processes", **options)
    np.testing.assert_array_equal(ids, told[0])
    np.testing.assert_array_equal(values, ids + 0.5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, one["variables"], two["variables"])


class DieOnce(Hook):
    """Kills the learner once, behind update 3."""

    def on_state(self, event):
        if event.step == 3 and lp.context.get_context().attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_learner_that_starts_again_goes_on_with_the_table_as_it_is():
    result, (ids, values) = replay.learnt(
        "processes", hooks=[DieOnce()], steps=20, restart=lp.Restart(attempts=1)
    )
    np.testing.assert_array_equal(values, ids + 0.5)
    assert result["step"] == 20
    # All of the second start; those of the first got there, or died with it.
    assert 20 * 8 <= len(ids) <= 23 * 8
