"""Strategies that partition give the answer of one device, for less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator import Replicator, strategies
from replicator.testing.invariance import GRADIENT_TOLERANCE
from tests.steps import lenient, normals

WIDTH = 16
adamw = lenient(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))


def batch_of(make):
    rng = np.random.default_rng(0)
    return make(rng)


def floats(*shape):
    return lambda rng: rng.normal(size=shape).astype(np.float32)


class Model:
    """Parameters, a loss, and a batch."""

    def __init__(self, params, loss_fn, batch):
        self.params, self.loss_fn, self.batch = params, loss_fn, batch


def mlp():
    params = {
        "up": normals(8, WIDTH, seed=1),
        "down": normals(WIDTH, 8, seed=2),
        "b": jnp.zeros(WIDTH),
    }

    def loss_fn(params, batch):
        y = jnp.tanh(batch["x"] @ params["up"] + params["b"][None]) @ params["down"]
        return jnp.square(y - batch["x"]).mean()

    return Model(params, loss_fn, {"x": batch_of(floats(16, 8))})


def conv():
    params = {"k": normals(3, 3, 8, WIDTH, seed=1), "scale": jnp.ones(WIDTH)}

    def loss_fn(params, batch):
        y = jax.lax.conv_general_dilated(
            batch["x"],
            params["k"],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        mean = y.mean((0, 1, 2), keepdims=True)
        var = jnp.square(y - mean).mean((0, 1, 2), keepdims=True)
        y = (y - mean) * jax.lax.rsqrt(var + 1e-3) * params["scale"][None, None, None]
        return jnp.square(jax.nn.relu(y) - 1).mean()

    return Model(params, loss_fn, {"x": batch_of(floats(16, 4, 4, 8))})


def layers():
    params = {"w": normals(4, WIDTH, WIDTH, seed=1) / 4}

    def loss_fn(params, batch):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        y, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], params["w"])
        return jnp.square(y - 1).mean()

    return Model(params, loss_fn, {"x": batch_of(floats(16, WIDTH))})


def embedding():
    params = {"table": normals(32, WIDTH, seed=1)}

    def loss_fn(params, batch):
        logits = params["table"][batch["id"]] @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["id"]
        ).mean()

    ids = np.random.default_rng(0).integers(0, 32, 16).astype(np.int32)
    return Model(params, loss_fn, {"id": ids})


MODELS = {"mlp": mlp, "conv": conv, "layers": layers, "embedding": embedding}
CUT = {"whole_below_bytes": 0}
STRATEGIES = {
    "zero1": strategies.zero1(**CUT),
    "zero2": strategies.zero2(replicas=2, **CUT),
    "fsdp": strategies.fsdp(**CUT),
    "hybrid": strategies.hybrid(shard=4, **CUT),
    "tensor_parallel": strategies.Rules(
        [strategies.Rule(pattern="*", stored="model", computed="model")],
        replica=4,
        model=2,
        **CUT,
    ),
}


def trainer(model, tx):
    """Return the plain functions of one device: nothing of ours in them."""

    def init_fn(key):
        return {"params": model.params, "opt": tx.init(model.params)}

    def step_fn(state, batch):
        loss, grads = jax.value_and_grad(model.loss_fn)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    return init_fn, step_fn


def over(strategy, **options):
    return Replicator(strategy=strategy, compilation_cache=False, **options)


def norm(tree):
    return np.sqrt(
        sum(np.square(np.float64(leaf)).sum() for leaf in jax.tree.leaves(tree))
    )


def apart(found, expected):
    """Return the norm of a difference, relative to that of what was expected."""
    found, expected = jax.device_get((found, expected))
    return norm(jax.tree.map(np.subtract, found, expected)) / norm(expected)


def assert_same_as_on_one_device(which, strategy):
    model = MODELS[which]()
    init_fn, step_fn = trainer(model, adamw)
    rep = over(strategy)
    step, state = rep.compile(step_fn), rep.init(init_fn)
    alone, expected = jax.jit(step_fn), init_fn(None)
    for number in range(3):
        state, _ = step(state, model.batch)
        expected, _ = alone(expected, model.batch)
        # Adam's first moment after one update is the gradient, up to a factor.
        if number == 0:
            moments = state["opt"][1][0].mu, expected["opt"][1][0].mu
            assert apart(*moments) <= GRADIENT_TOLERANCE
    assert apart(state["params"], expected["params"]) <= 1e-4


@pytest.mark.parametrize("which", ["layers", "embedding"])
def test_an_unmodified_step_gives_the_gradient_of_one_device(which):
    assert_same_as_on_one_device(which, STRATEGIES["fsdp"])


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("which", MODELS)
def test_every_strategy_gives_the_gradient_of_one_device(which, name):
    assert_same_as_on_one_device(which, STRATEGIES[name])
