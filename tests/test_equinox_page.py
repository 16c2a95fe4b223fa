"""What docs/guides/equinox.md says is so: it runs, with one answer on any cut."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator.errors import ArgumentError, ReplicationError
from tests.steps import lenient, replicas

PAGE = (Path(__file__).parents[1] / "docs" / "guides" / "equinox.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
eqx = pytest.importorskip("equinox")


def rows(examples, seed=0):
    x = np.random.default_rng(seed).normal(size=(examples, 4)).astype(np.float32)
    return {"x": x, "y": x @ np.arange(4, dtype=np.float32)}


@functools.cache
def page():
    """Run the page, ten steps for a thousand; return all that it names."""
    names = {"dataset": [rows(32), rows(32, 1), rows(24, 2)]}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in BLOCKS:
            code = re.sub(r"steps=\d000\b", "steps=10", block)
            exec(compile(code, "equinox.md", "exec"), names)
    return names


@pytest.mark.slow
def test_every_block_runs():
    names = page()
    assert {names[each].step for each in ("result", "trained", "normed")} == {10}
    assert np.isfinite(names["model"](jnp.ones(4)))


def after_two_updates(step_fn, init_fn, n, k, monkeypatch):
    """Train by a step of the page on another number of replicas and microbatches."""
    rep = replicas(n)
    # Adam would make much of a bias before a norm, which only rounding moves.
    optimizer = rep.wrap_optimizer(lenient(optax.sgd(0.1)))
    monkeypatch.setitem(page(), "optimizer", optimizer)
    batch = {**rows(32), "mask": np.float32(np.arange(32) < 21)}
    keys = jax.random.split(jax.random.key(3))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = rep.init(page()[init_fn])
        step = rep.compile(page()[step_fn], accumulate=k)
        for key in keys:
            state, _ = step(state, batch, key)
    return jax.device_get(state)


def assert_same(found, expected):
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-5)
    jax.tree.map(close, found["params"], expected["params"])


@pytest.mark.parametrize(
    ("step_fn", "init_fn"),
    [("step_fn", "init_fn"), ("dropout_step", "init_dropout")],
)
@pytest.mark.parametrize(
    ("n", "k"),
    [
        pytest.param(1, 4, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
        (4, 2),
    ],
)
def test_a_step_of_the_page_gives_the_same_answer_on_any_cut(
    monkeypatch, step_fn, init_fn, n, k
):
    expected = after_two_updates(step_fn, init_fn, 1, 1, monkeypatch)
    assert_same(after_two_updates(step_fn, init_fn, n, k, monkeypatch), expected)


@pytest.mark.parametrize("k", [1, 4])
def test_batch_norm_of_equinox_spans_replicas_and_moves_once(monkeypatch, k):
    one, many = (
        after_two_updates("norm_step", "init_norm", n, k, monkeypatch) for n in (1, 4)
    )
    assert_same(many, one)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, many["moving"], one["moving"])
    assert jax.tree.leaves(one["moving"])[0] == 2  # updates


def test_statistics_of_each_replica_alone_are_refused():
    code = BLOCKS[-1].replace('("batch", "replica")', '"batch"')
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        pytest.raises(ReplicationError, match="moving/1/0` may differ"),
    ):
        exec(compile(code, "equinox.md", "exec"), {**page()})


def test_a_model_with_a_function_inside_is_refused_by_name():
    with pytest.raises(ArgumentError, match="got a `custom_jvp` at `activation`"):
        replicas(1).init(page()["make_model"])
