"""Differences count in the norm of what belongs together, as in law 1."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator.engine.first_update.comparison import (
    Compared,
    differences,
    paths_and_groups,
)

LARGE, NOTHING = np.ones(4, np.float32), np.full(4, 1e-9, np.float32)
ZEROS = np.zeros(4, np.float32)


def moments(*names):
    return [Compared(f"opt/mu/{name}", "opt/mu", moves=True) for name in names]


def test_a_gradient_that_is_nothing_but_rounding_counts_with_the_others():
    found, expected = [LARGE, NOTHING], [LARGE, -NOTHING]
    apart = differences(found, expected, [ZEROS] * 2, moments("w", "b"))
    assert apart["opt/mu"] < 1e-8


def test_a_moment_counts_by_how_far_it_moved():
    before = 1e3 * LARGE
    moved, half = before + 1, before + 0.5
    [off] = differences([half], [moved], [before], moments("w")).values()
    assert off == pytest.approx(0.5, rel=1e-3)


def test_a_metric_that_is_zero_but_for_rounding_counts_with_the_largest():
    told = [Compared(f"metrics/{n}", f"metrics/{n}", moves=False) for n in "ab"]
    loss, whitened = np.float32(2.0), np.float32(1e-8)
    apart = differences([loss, -whitened], [loss, whitened], [], told)
    assert apart["metrics/b"] < 1e-7


def test_a_number_that_only_many_devices_lose_is_infinitely_far():
    lost = np.array([np.nan, 1, 1, 1], np.float32)
    assert differences([lost], [LARGE], [ZEROS], moments("w")) == {"opt/mu": np.inf}


def test_what_is_not_finite_on_one_device_is_left_out():
    lost = np.array([np.inf, 1, 1, 1], np.float32)
    assert differences([LARGE], [lost], [ZEROS], moments("w")) == {}


def test_fields_of_the_innermost_optimizers_are_groups():
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    tx = optax.chain(optax.masked(optax.adam(0.1), {"w": True, "b": False}))
    state = {"params": params, "opt": tx.init(params), "queue": {"rows": jnp.ones(2)}}
    groups = dict(paths_and_groups(state, {"loss": jnp.ones(())}))
    assert groups["params/w"] == groups["params/b"] == "params"
    assert groups["queue/rows"] == "queue"
    assert groups["opt/0/inner_state/0/mu/w"] == "opt/0/inner_state/0/mu"
    assert groups["metrics/loss"] == "metrics/loss"
