"""What a step is made of keeps its answer, and weights alone are gathered."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator import Replicator, strategies
from tests.steps import assert_close, lenient, normals

WIDTH = 16
adamw = lenient(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
x = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


def w(seed=1):
    return {"w": normals(WIDTH, WIDTH, seed=seed) / 4}


@jax.custom_vjp
def doubled(x, w):
    return jnp.tanh(x @ w)


def _fwd(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def _bwd(kept, ct):
    x, w, y = kept
    ct = ct * (1 - y * y)
    return ct @ w.T, 2 * x.T @ ct


doubled.defvjp(_fwd, _bwd)


@jax.custom_jvp
def product(x, w):
    return x @ w


product.defjvp(
    lambda given, dots: (given[0] @ given[1], dots[0] @ given[1] + given[0] @ dots[1])
)


def by_cond(p, x):
    return jax.lax.cond(x.sum() > 0, lambda: x @ p["w"], lambda: -x @ p["w"].T)


def by_while(p, x):
    # Not differentiated: the weights are refined in a loop of unknown length first.
    def turn(state):
        n, w = state
        return n + 1, w - 0.01 * (w @ w.T) @ w

    n = (x > 9).sum() + 3
    _, refined = jax.lax.while_loop(lambda s: s[0] < n, turn, (0, p["w"]))
    return x @ p["w"] @ jax.lax.stop_gradient(refined)


def by_lstm(p, x):
    def cell(carry, row):
        h = jnp.tanh(carry @ p["w"] + row)
        return h, h

    return jax.lax.scan(cell, jnp.zeros_like(x), jnp.stack([x, x, x]))[1]


def by_reshape(p, x):
    heads = p["w"].reshape(WIDTH, 4, 4)
    return jnp.einsum("bd,dhk->bhk", x, heads)


def by_stacked_slices(p, x):
    for n in range(2):
        x = jnp.tanh(x @ p["w"][n * 8 : (n + 1) * 8].T @ p["w"][:8])
    return x


def in_half(p, x):
    return (x.astype(jnp.float16) @ p["w"].astype(jnp.float16)).astype(jnp.float32)


def normalised(p, x):
    return x @ (p["w"] / jnp.linalg.norm(p["w"], axis=0, keepdims=True))


MODELS = {
    "custom_vjp": lambda p, x: doubled(x, p["w"]),
    "custom_jvp": lambda p, x: product(x, p["w"]),
    "jit": lambda p, x: jax.jit(jnp.dot)(x, p["w"]),
    "cond": by_cond,
    "while": by_while,
    "recurrent": by_lstm,
    "reshape": by_reshape,
    "slices": by_stacked_slices,
    "half precision": in_half,
    "weight norm": normalised,
    "remat of remat": jax.checkpoint(
        lambda p, x: jax.checkpoint(jnp.dot)(jnp.tanh(x @ p["w"]), p["w"])
    ),
    "inverse": lambda p, x: jnp.linalg.solve(p["w"] + 4 * jnp.eye(WIDTH), x.T),
}


def trainer(model, tx=adamw):
    def loss_fn(params, x):
        return jnp.square(model(params, x) - 1).mean()

    def init_fn(key):
        return {"params": w(), "opt": tx.init(w())}

    def step_fn(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch["x"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    return init_fn, step_fn


def over(strategy):
    return Replicator(strategy=strategy, compilation_cache=False)


def first_moment(state):
    return state["opt"][1][0].mu


FAST = {"custom_vjp", "cond", "while"}


@pytest.mark.parametrize(
    "which",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in MODELS],
)
def test_a_gradient_is_that_of_one_device(which):
    init_fn, step_fn = trainer(MODELS[which])
    rep = over(strategies.fsdp(whole_below_bytes=0))
    state, _ = rep.compile(step_fn)(rep.init(init_fn), {"x": x})
    expected, _ = jax.jit(step_fn)(init_fn(None), {"x": x})
    tolerance = 2e-3 if which == "half precision" else 1.1e-5

    assert_close(first_moment(state), first_moment(expected), rtol=tolerance)


def collectives(model, rows, strategy):
    """Count collectives of arrays in the compiled step, by kind and shape."""
    init_fn, step_fn = trainer(model)
    rep = over(strategy)
    batch = {"x": np.ones((rows, WIDTH), np.float32)}
    text = rep.compile(step_fn).lower(rep.init(init_fn), batch).compile().as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(
        rf"(\S+ )=? ?\(?\w+\[([\d,]+)\][^=]*? ({kinds})(?:-start)?\(", text
    )
    return collections.Counter((kind, shape) for _, shape, kind in found)


@pytest.mark.parametrize("which", ["recurrent", "weight norm"])
def test_only_weights_are_gathered_and_only_gradients_reduced(which):
    rows = 48  # of activations: no weight has such a dimension
    found = collectives(MODELS[which], rows, strategies.fsdp(whole_below_bytes=0))

    assert found
    assert {kind for kind, _ in found} <= {"all-gather", "all-reduce", "reduce-scatter"}
    for _, shape in found:
        assert "48" not in shape.split(",")
        assert "6" not in shape.split(",")  # 48 over 8 devices


def test_what_is_not_understood_gets_its_weights_whole_and_is_named(caplog):
    init_fn, step_fn = trainer(MODELS["inverse"])
    rep = over(strategies.fsdp(whole_below_bytes=0))
    rep.compile(step_fn).lower(rep.init(init_fn), {"x": x})

    assert "`custom_linear_solve` at" in caplog.text


def written_twice(w):
    return w.at[0].set(1.0).at[1, 2].add(2.0)


def gradient_written_into(w):
    grads = jax.grad(lambda w: jnp.square(written_twice(w)).sum())(w)
    return w - 0.1 * grads.at[3].set(0.0).at[4].multiply(2.0)


def gradient_through_a_relu(w):
    return w - jax.grad(lambda w: jnp.square(jax.nn.relu(written_twice(w))).sum())(w)


@pytest.mark.parametrize(
    "strategy",
    [
        strategies.fsdp(replicas=2, whole_below_bytes=0),
        strategies.hybrid(shard=4, whole_below_bytes=0),
        strategies.zero2(replicas=2, whole_below_bytes=0),
    ],
    ids=["replicas=2", "hybrid", "zero2"],
)
@pytest.mark.parametrize(
    "update", [written_twice, gradient_written_into, gradient_through_a_relu]
)
def test_what_is_written_into_twice_is_that_of_one_device(update, strategy):
    found = new_state(update, strategy)

    np.testing.assert_allclose(found, update(w()["w"]), rtol=1e-5)


def new_state(update, strategy):
    rep = over(strategy)
    step = rep.compile(lambda state, batch: ({"w": update(state["w"])}, {}))
    state, _ = step(rep.put(w()), {"x": x})
    return state["w"]


@pytest.mark.parametrize(
    "update",
    [
        lambda w: 0.9 * w + 0.1 * jnp.eye(WIDTH),
        lambda w: jnp.arange(float(w.size)).reshape(w.shape),
    ],
    ids=["eye", "arange"],
)
def test_what_is_made_of_nothing_may_become_state(update):
    found = new_state(update, strategies.fsdp(whole_below_bytes=0))

    np.testing.assert_allclose(found, update(w()["w"]), rtol=1e-6)


def test_what_is_stored_whole_is_multiplied_in_the_pieces_that_a_rule_names():
    rule = strategies.Rule(pattern="w", stored=(), computed=(None, "model"))
    rep = over(strategies.Rules([rule], model=8))
    step = rep.compile(lambda state, batch: (state, {"y": (batch["x"] @ state["w"])}))
    text = step.lower(rep.put(w()), {"x": x}).compile().as_text()

    assert re.search(r"f32\[16,2\]\S* (dot|custom-call)", text)
