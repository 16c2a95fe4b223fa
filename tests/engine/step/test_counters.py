"""Under accumulation a counter goes with what it weighs, places or counts; or once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import replicator
from replicator import all_gather, all_reduce, is_last_microbatch, wrap_optimizer
from replicator.errors import ArgumentError
from tests.steps import apply, lenient, regression_batch, replicas

BATCH = regression_batch()
PARTS = BATCH["x"].reshape(4, 4, 4)
SLOTS = 24


def after(start, move, *, k=4, steps=1, n=2):
    """Return the state after updates of a model that holds `start` besides."""
    optimizer = lenient(wrap_optimizer(optax.sgd(0.1)))

    def init_fn(key):
        return {"params": jnp.ones(4), "opt": optimizer.init(jnp.ones(4)), **start}

    def step_fn(state, batch):
        grads = jax.grad(lambda w: ((batch["x"] @ w) ** 2).mean())(state["params"])
        with jax.numpy_dtype_promotion("standard"):
            return apply(optimizer, state, grads) | move(state, batch), {}

    rep = replicas(n)
    state, step = rep.init(init_fn), rep.compile(step_fn, accumulate=k)
    for _ in range(steps):
        state, _ = step(state, BATCH)
    return jax.device_get(state)


def mean_of(batch):
    return all_reduce(batch["x"].mean())


def each(table, move):
    """Move each counter of a table, all of them in one step."""
    return lambda state, batch: {
        name: move(state[name], batch, *row[1:]) for name, row in table.items()
    }


WEIGHING = {
    "1 + n": (0, lambda n: 1 + n),
    "n + 1.0": (0.0, lambda n: n + 1.0),
    "n - -1": (0, lambda n: n - (-1)),
    "safe_increment": (0, optax.safe_increment),
    "cast": (0, lambda n: (n.astype(float) + 1).astype(n.dtype)),
    "min": (0, lambda n: jnp.minimum(n + 1, 99)),
    "clip": (0, lambda n: jnp.clip(n + 1, 0, 99)),
    "where": (0, lambda n: jnp.where(n < 99, n + 1, n)),
    "rem": (0, lambda n: (n + 1) % 99),
    "(1,)": (jnp.zeros(1, jnp.int32), lambda n: n + np.ones(1, np.int32)),
    "jit": (0, jax.jit(lambda n: n + 1)),
    "born strong": (jnp.zeros((), jnp.int32), lambda n: n + 1),
    "read in another spelling": (0, lambda n: n + 1, lambda n: 1.0 + n.astype(float)),
}
COUNTING = {
    "seen + n": (0, lambda seen, n: seen + n),
    "min(n + seen, K)": (0, lambda seen, n: jnp.minimum(n + seen, 40)),
    "float": (0.0, lambda seen, n: seen + float(n)),
    "and": (0, lambda seen, n: (seen + n) & 63),
    "at": (jnp.zeros(1, jnp.int32), lambda seen, n: seen.at[0].add(n)),
    "reduced": (0, lambda seen, n: seen + all_reduce(jnp.asarray(n // 2), "sum")),
}
POINTING = {
    "modulo": (0, lambda place, n: (place + n) % SLOTS),
    "lax.rem": (0, lambda place, n: lax.rem(n + place, SLOTS)),
    "where": (0, lambda place, n: jnp.where(place + n < SLOTS, place + n, 0)),
}


def weigh(own, batch, move, read=None):
    count = move(own["n"])
    weight = count if read is None else read(own["n"])
    away = mean_of(batch) - own["mean"]
    return {"n": count, "mean": own["mean"] + away / weight.astype(float).reshape(())}


def fill(own, batch, move):
    keys = all_gather(batch["x"][:, 0]).reshape(-1)
    places = (own["place"] + jnp.arange(len(keys))) % SLOTS
    queue = own["queue"].at[places].set(keys)
    return {"queue": queue, "place": move(own["place"], len(keys))}


def test_a_count_that_weighs_a_mean_counts_microbatches_in_any_spelling():
    start = {name: {"n": row[0], "mean": 0.0} for name, row in WEIGHING.items()}
    state = after(start, each(WEIGHING, weigh))
    counts = {name: state[name]["n"].item() for name in WEIGHING}
    assert counts == dict.fromkeys(WEIGHING, 4)
    means = [state[name]["mean"] for name in WEIGHING]
    np.testing.assert_allclose(means, BATCH["x"].mean(), rtol=1e-5)


@pytest.mark.parametrize("k", [1, 4])
def test_a_pointer_loses_no_key_and_a_count_no_example(k):
    start = {name: {"queue": jnp.zeros(SLOTS), "place": 0} for name in POINTING}
    count = each(COUNTING, lambda seen, batch, move: move(seen, 2 * len(batch["x"])))
    start |= {name: row[0] for name, row in COUNTING.items()}
    fills = each(POINTING, fill)
    state = after(start, lambda s, b: fills(s, b) | count(s, b), k=k, steps=2)
    keys = np.tile(BATCH["x"][:, 0], 2)
    queue = np.concatenate([keys[24:], keys[8:24]])
    for name in ("modulo", "lax.rem"):
        np.testing.assert_array_equal(state[name]["queue"], queue)
    assert [state[name].item() for name in COUNTING] == [32, 32, 32.0, 32, 32, 32]


def test_a_microbatch_of_one_example_is_counted():
    def move(state, batch):
        return {"seen": state["seen"] + len(batch["x"]), "step": state["step"] + 1}

    state = after({"seen": 0, "step": 0}, move, k=16, n=1)
    assert (state["seen"], state["step"]) == (16, 1)


def test_a_sum_that_is_kept_and_reset_at_the_last_microbatch_is_that_of_an_update():
    def move(state, batch):
        total, n = state["total"] + mean_of(batch), state["n"] + 1
        last = is_last_microbatch()
        return {
            "total": jnp.where(last, 0, total),
            "n": jnp.where(last, 0, n),
            "mean": jnp.where(last, total / n, state["mean"]),
        }

    state = after({"total": 0.0, "n": 0, "mean": 0.0}, move, steps=2)
    np.testing.assert_allclose(state["mean"], BATCH["x"].mean(), rtol=1e-5)
    assert state["n"] == 0


@pytest.mark.parametrize("k", [1, 4])
def test_the_number_of_microbatches_is_known_in_a_step(k):
    def move(state, batch):
        here = 2 * len(batch["x"]) * replicator.num_microbatches()
        once = jnp.where(is_last_microbatch(), here, 0)
        return {"ungated": state["ungated"] + here, "gated": state["gated"] + once}

    state = after({"ungated": 0, "gated": 0}, move, k=k)
    assert (state["ungated"], state["gated"]) == (16, 16)
    assert replicator.num_microbatches() == 1


def test_the_number_of_microbatches_is_known_in_a_loop_of_ones_own():
    optimizer = wrap_optimizer(optax.sgd(0.1), accumulate=3)

    def step_fn(state, batch):
        after = apply(optimizer, state, jnp.ones(4))
        return after | {"k": state["k"] * 0 + replicator.num_microbatches()}, {}

    def init_fn(key):
        return {"params": jnp.ones(4), "opt": optimizer.init(jnp.ones(4)), "k": 0}

    rep = replicas(2)
    state = rep.init(init_fn)
    assert rep.compile(step_fn)(state, BATCH)[0]["k"] == 3


def schedules(state, batch):
    """Warm up and anneal a loss of which a running mean is kept; sizes are fixed."""
    warm = jnp.minimum(1.0, (1 + state["step"]) / 100)
    loss = all_reduce(batch["x"].reshape(2, 4).mean()) * warm / state["heat"]
    return {
        "step": state["step"] + 1,
        "heat": state["heat"] * 0.5,
        "loss": 0.9 * state["loss"] + loss,
        "average": state["average"] + (state["params"] - state["average"]) / 2,
        "calls": state["calls"] + 1 + 1,
    }


def test_what_counts_updates_moves_once_also_where_sizes_are_fixed():
    start = {"step": 0, "heat": 1.0, "loss": 0.0, "average": jnp.zeros(4), "calls": 0}
    state = after(start, schedules, steps=2)
    found = {name: state[name].item() for name in ("step", "heat", "calls")}
    assert found == {"step": 2, "heat": 0.25, "calls": 4}


def annealed(state, batch):
    away = mean_of(batch) - state["mean"]
    rate = 0.9 * state["rate"]
    return {"rate": rate, "mean": state["mean"] + rate * away}


def history(state, batch):
    found = state["history"].at[state["step"]].set(mean_of(batch))
    return {"history": found, "step": state["step"] + 1}


def begun(state, batch):
    first = jnp.where(state["done"], state["first"], mean_of(batch))
    return {"done": jnp.ones((), bool), "first": first}


def divided(state, batch):
    away = mean_of(batch) - state["mean"]
    return {"n": state["n"] + 1, "mean": state["mean"] + away * (1 / state["n"])}


def fixed(state, batch):
    own = {"queue": state["queue"], "place": state["place"]}
    batch = {"x": batch["x"].reshape(2, 4)}
    return fill(own, batch, lambda place, n: (place + 4) % SLOTS)


UNDECIDED = {
    "rate": ({"rate": 1.0, "mean": 0.0}, annealed, "mean"),
    "step": ({"history": jnp.zeros(9), "step": 0}, history, "history"),
    "done": ({"done": False, "first": 0.0}, begun, "first"),
    "n": ({"n": 1, "mean": 0.0}, divided, "mean"),
    "place": ({"queue": jnp.zeros(SLOTS), "place": 0}, fixed, "queue"),
}


@pytest.mark.parametrize("leaf", UNDECIDED)
def test_what_cannot_be_told_is_refused_by_name(leaf):
    start, move, reader = UNDECIDED[leaf]
    with pytest.raises(ArgumentError) as found:
        after(start, move)
    assert str(found.value) == (
        f"`accumulate` must be 1 where `{leaf}` of the returned state moves once per "
        f"update and `{reader}`, which reads it, with each microbatch, got more. Gate "
        "one: `jnp.where(replicator.is_last_microbatch(), new, old)`."
    )


def test_one_microbatch_leaves_nothing_to_tell():
    start, move, _ = UNDECIDED["rate"]
    assert after(start, move, k=1)["rate"] == np.float32(0.9)


@pytest.mark.parametrize("gated", ["step", "history"])
def test_what_is_refused_runs_with_either_gated(gated):
    def move(state, batch):
        moved = history(state, batch)
        own = jnp.where(is_last_microbatch(), moved[gated], state[gated])
        return moved | {gated: own}

    state = after({"history": jnp.zeros(9), "step": 0}, move)
    assert state["step"] == 1
    np.testing.assert_allclose(state["history"][0], PARTS[-1].mean(), rtol=1e-5)


def test_a_sum_of_what_is_written_down_is_refused_where_sizes_are_fixed():
    def move(state, batch):
        return {"seen": state["seen"] + 4, "x": batch["x"].reshape(2, 4).sum() * 0}

    with pytest.raises(ArgumentError, match="as what it adds may count examples"):
        after({"seen": 0, "x": 0.0}, lambda s, b: move(s, b) | {"x": s["x"]})
