"""What a rounding can turn over is not compared; gradients always are."""

import jax
import jax.numpy as jnp
import optax
import pytest

from replicator.engine.first_update.sensitivity import comparable
from tests.steps import lenient

X = jnp.ones((4, 3))
W = jnp.ones((3, 3))
LABEL = jnp.zeros(4, jnp.int32)


def is_compared(fn, *args):
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    [compared], _ = comparable(jaxpr, [True] * len(jaxpr.invars))
    return compared


def _of_each(x, w, factor):
    """Return the mean of each example's gradient, times a factor of its norm."""
    each = jax.vmap(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (None, 0))(w, x)
    norm = jnp.sqrt(jnp.square(each).sum((1, 2), keepdims=True))
    return (each * factor(norm)).mean(0)


TURNED = {
    "accuracy": lambda x, w: (jnp.argmax(x @ w, -1) == LABEL).mean(),
    "sorted": lambda x, w: x[jnp.argsort((x @ w)[:, 0])],
    "rounded": lambda x, w: jnp.round((x @ w).sum()),
    "counted": lambda x, w: jnp.where(x @ w > 0, 1.0, 0.0).sum(),
    "cast": lambda x, w: ((x @ w).astype(jnp.int32)).astype(jnp.float32).sum(),
    "largest": lambda x, w: x[jax.lax.top_k((x @ w)[:, 0], 2)[1]],
    "normed examples": lambda x, w: _of_each(x, w, lambda n: 1 / n),
    "in a loop": lambda x, w: jax.lax.scan(
        lambda c, row: (c + (row @ w > 0).astype(jnp.float32), None), jnp.zeros(3), x
    )[0],
    "chosen": lambda x, w: jax.lax.cond((x @ w).sum() > 0, lambda: 1.0, lambda: 0.0),
    "integers": lambda x, w: jnp.arange(3),
}


@pytest.mark.parametrize("name", TURNED)
def test_what_a_rounding_turns_over_is_not_compared(name):
    assert not is_compared(TURNED[name], X, W)


HELD = {
    "loss": lambda x, w: jnp.square(x @ w).mean(),
    "relu": lambda x, w: jax.nn.relu(x @ w).mean(),
    "where": lambda x, w: jnp.where(x @ w > 0, x @ w, 0.0).mean(),
    "mask of words": lambda x, w: (
        (LABEL == 0).astype(jnp.float32)[:, None] * (x @ w)
    ).sum(),
    "dropout": lambda x, w: jnp.where(
        jax.random.uniform(jax.random.key(0), (4, 3)) < 0.5, x @ w, 0.0
    ).sum(),
    "queue": lambda x, w: jnp.roll(x.at[0].set(w[0]), 2, 0),
    "sorted values": lambda x, w: jnp.sort(x @ w, 0),
    "clipped examples": lambda x, w: _of_each(
        x, w, lambda n: jnp.minimum(1.0, 2.0 / n)
    ),
    "scaled examples": lambda x, w: _of_each(x, w, lambda n: 1 / jnp.maximum(n, 2.0)),
    "labels": lambda x, w: optax.softmax_cross_entropy_with_integer_labels(
        x @ w, LABEL
    ).mean(),
    "gradient of relu": lambda x, w: jax.grad(lambda w: jax.nn.relu(x @ w).sum())(w),
}


@pytest.mark.parametrize("name", HELD)
def test_what_rounding_moves_a_little_is_compared(name):
    assert is_compared(HELD[name], X, W)


@pytest.mark.parametrize(
    ("tx", "compares_params", "kept"),
    [
        (optax.sgd(0.1), True, set()),
        (optax.sgd(0.1, 0.9), True, {"trace"}),
        (optax.adam(0.1), False, {"mu", "nu"}),
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
            False,
            {"mu", "nu"},
        ),
        (optax.adafactor(0.1, min_dim_size_to_factor=2), False, {"v_row", "v_col"}),
        (optax.lion(0.1), False, {"mu"}),
        (optax.contrib.muon(0.1), False, {"mu"}),
        (optax.sign_sgd(0.1), False, set()),
        (optax.lars(0.1), False, set()),
    ],
)
def test_what_an_optimizer_keeps_of_gradients_is_compared(tx, compares_params, kept):
    tx, params = lenient(tx), {"one": W, "two": 2 * W}
    state = {"params": params, "opt": tx.init(params)}

    def step(state):
        def loss_fn(params):
            return jnp.tanh(X @ params["one"] @ params["two"]).sum()

        grads = jax.grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    jaxpr = jax.make_jaxpr(step)(state).jaxpr
    pairs = zip(*comparable(jaxpr, [True] * len(jaxpr.invars)), strict=True)
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    names = {
        jax.tree_util.keystr(path)
        for (path, _), (compared, moves) in zip(paths, pairs, strict=True)
        if compared and moves
    }
    assert any("params" in name for name in names) == compares_params
    assert {n.split(".")[-1].split("[")[0] for n in names if "'opt'" in n} == kept
