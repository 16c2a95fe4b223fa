import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator.collectives.synchronise.method import SumMethod, sent_bytes
from replicator.engine.reduction.row_bounds import (
    DENSE,
    asking,
    mark_rows,
    rows_of,
)
from replicator.strategies import Rule
from tests.engine.reduction.problems import replicator_with

TABLE = (512, 16)
ROWS = Rule(pattern="params/table", synchronise="rows")


def found(loss_fn, *arrays):
    """Return the rows of the gradient of a loss of a table."""

    def fn(table, *arrays):
        grad = jax.grad(loss_fn)(table, *arrays)
        return mark_rows(grad, ["table"])

    with asking():
        closed = jax.make_jaxpr(fn)(jnp.ones(TABLE), *arrays)
    return rows_of(closed.jaxpr)["table"]


PLACES = jnp.arange(6).reshape(2, 3)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda table, at: table[at].sum(),
        lambda table, at: (jnp.take(table, at, axis=0) ** 2).mean(),
        lambda table, at: jax.checkpoint(lambda t: t[at].sum())(table),
        lambda table, at: jax.vmap(lambda i: table[i])(at).sum(),
        lambda table, at: jax.jit(lambda t: 2.0 * t[at])(table).sum(),
        lambda table, at: table.astype(jnp.bfloat16)[at].astype(jnp.float32).sum(),
    ],
    ids=["index", "take", "remat", "vmap", "jit", "cast"],
)
def test_a_lookup_has_as_many_rows_as_places(loss_fn):
    assert found(loss_fn, PLACES) == 6


def test_two_lookups_have_the_rows_of_both():
    assert found(lambda t, at: t[at].sum() + (t[at[0]] ** 2).sum(), PLACES) == 9


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda table, at: (table[at] @ table.T).sum(),
        lambda table, at: table[:, at[0]].sum(),
        lambda table, at: table[at].sum() + 1e-4 * (table**2).sum(),
        lambda table, at: jax.lax.scan(
            lambda c, i: (c + table[i].sum(), None), 0.0, at
        )[0],
        lambda table, at: (jax.nn.one_hot(at, 512) @ table).sum(),
    ],
    ids=["tied", "columns", "decay", "loop", "one-hot"],
)
def test_what_is_not_a_lookup_alone_is_dense(loss_fn):
    assert found(loss_fn, PLACES) == DENSE


def embedding(rep, *, tied=False, **options):
    """Return `init_fn` and `step_fn` of a model that looks words up."""
    optimizer = rep.wrap_optimizer(optax.sgd(0.1), **options)

    def init_fn(key):
        one, two = jax.random.split(key)
        params = {"table": jax.random.normal(one, TABLE)}
        params["out"] = jax.random.normal(two, (*TABLE[1:], 4))
        return {"params": params, "opt": optimizer.init(params)}

    def loss_fn(params, batch):
        rows = params["table"][batch["at"]].mean(axis=1)
        scores = rows @ params["out"]
        if tied:
            scores += (rows @ params["table"].T)[:, :4]
        return ((scores - batch["y"]) ** 2).mean()

    def step_fn(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    return init_fn, step_fn


def words(examples=16, seed=0):
    rng = np.random.default_rng(seed)
    places = rng.integers(0, TABLE[0], (examples, 3)).astype(np.int32)
    return {"at": places, "y": rng.normal(size=(examples, 4)).astype(np.float32)}


def updated(rep, *, accumulate=1, **options):
    init_fn, step_fn = embedding(rep, **options)
    step, state = rep.compile(step_fn, accumulate=accumulate), rep.init(init_fn)
    for seed in range(2):
        state, _ = step(state, words(seed=seed))
    return jax.device_get(state["params"])


@pytest.mark.parametrize(
    ("n", "accumulate"), [pytest.param(2, 1, marks=pytest.mark.slow), (8, 2)]
)
def test_rows_give_the_answer_of_one_replica(n, accumulate):
    rep = replicator_with(ROWS, n=n)
    mine, true = updated(rep, accumulate=accumulate), updated(replicator.Replicator(1))
    for name in true:
        np.testing.assert_allclose(mine[name], true[name], atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_only_rows_travel(accumulate):
    rep = replicator_with(ROWS)
    init_fn, step_fn = embedding(rep)
    step = rep.compile(step_fn, accumulate=accumulate)
    inspected = rep.inspect(step, init_fn, words())
    by_rows = SumMethod(synchronise="rows")
    wanted = sent_bytes(by_rows, TABLE, "float32", 8, rows=2 * 3)
    gathers = [each for each in inspected.collectives if each.kind == "all-gather"]
    assert sum(each.wire_bytes for each in gathers) == wanted


def test_a_tied_table_is_added_up_whole():
    rep = replicator_with(ROWS)
    init_fn, step_fn = embedding(rep, tied=True)
    assert set(rep.inspect(step_fn, init_fn, words()).counts()) == {
        "all-reduce replica"
    }


@pytest.mark.slow
def test_rows_of_a_loop_of_ones_own_are_those_of_its_microbatches():
    found = []
    for rep in (replicator_with(ROWS, n=2), replicator.Replicator(1)):
        init_fn, step_fn = embedding(rep, accumulate=2)
        step, state = rep.compile(step_fn), rep.init(init_fn)
        for seed in range(2):
            state, _ = step(state, words(seed=seed))
        found.append(jax.device_get(state["params"]["table"]))
    np.testing.assert_allclose(*found, atol=2e-6)
