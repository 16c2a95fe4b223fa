"""Pipelines whose stages lie by strategies: updates of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator import controller, strategies
from replicator.strategies import Rule, Rules
from tests.steps import lenient

RNG = np.random.default_rng(0)
TIED = {"2/table": "0/table"}


def weights(*shape):
    return RNG.normal(size=shape).astype(np.float32) / np.float32(np.sqrt(shape[0]))


def embed(params, tokens):
    return params["table"][tokens]


def dense(params, x):
    return jnp.tanh(x @ params["w"] + params["b"][None])


def head(params, x):
    return dense(params, x) @ params["table"].T


def loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


STAGES = [embed, dense, head]
PARAMS = [
    {"table": weights(12, 8)},
    {"w": weights(8, 8), "b": weights(8)},
    {"w": weights(8, 8), "b": weights(8), "table": None},
]
X, LABELS = RNG.integers(0, 12, 16), RNG.integers(0, 12, 16)
CLIPPED = lenient(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)))
SMALL = {"whole_below_bytes": 0}
BY_ROWS = {"params/1/w": (None, "model"), "params/1/b": ("model",)}
TENSOR = strategies.tensor_parallel(BY_ROWS, model=2, replicas=2)
EMBEDDING = Rules([Rule(pattern="params/0/table", stored=("shard",))], shard=4)

CASES = {
    "fsdp": strategies.fsdp(**SMALL),
    "data_parallel": strategies.data_parallel(),
    "zero1": strategies.zero1(**SMALL),
    "zero2": strategies.zero2(**SMALL),
    "hybrid": strategies.hybrid(shard=2, **SMALL),
    "one for each": [EMBEDDING, TENSOR, strategies.fsdp(**SMALL)],
}


@pytest.fixture(scope="module")
def pw():
    with controller.local(islands=2, devices=4) as opened:
        yield opened


def one_device(params, optimizer):
    def of_batch(params):
        x = embed(params[0], X)
        x = dense(params[1], x)
        return loss(head({**params[2], "table": params[0]["table"]}, x), LABELS)

    mean, gradients = jax.value_and_grad(of_batch)(params)
    updates, optimizer = CLIPPED.update(gradients, optimizer, params)
    return mean, gradients, (optax.apply_updates(params, updates), optimizer)


def pipeline(pw, strategy):
    each = strategy if isinstance(strategy, list) else [strategy] * 3
    slices = [
        pw.slice(4, axes=own.sizes(4), island=f"island{n % 2}")
        for n, own in enumerate(each)
    ]
    return pw.pipeline(
        STAGES, loss, slices, 2, optimizer=CLIPPED, shared=TIED, strategy=strategy
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "fsdp" else pytest.mark.slow) for n in CASES],
)
def test_updates_under_a_strategy_equal_one_device(pw, name):
    pipe = pipeline(pw, CASES[name])
    state, (params, optimizer) = pipe.init(PARAMS), (PARAMS, CLIPPED.init(PARAMS))
    for _ in range(2):
        found = pipe(state, X, LABELS)
        state, wanted = found.state, jax.jit(one_device)(params, optimizer)
        params, optimizer = wanted[2]
        leaves = jax.tree.leaves(found)
        for one, other in zip(leaves, jax.tree.leaves(wanted), strict=True):
            # Law 1: gradients to 1.1e-5 of their norm.
            error = np.linalg.norm(np.asarray(one) - np.asarray(other))
            assert error <= 1.1e-5 * max(np.linalg.norm(other), 1e-3)


@pytest.mark.slow
def test_a_state_lies_in_the_same_pieces_after_an_update(pw):
    pipe = pipeline(pw, strategies.fsdp(**SMALL))
    state = pipe.init(PARAMS)
    leaves = jax.tree.leaves(state.params)
    assert {each._layout.spec[0] for each in leaves} == {"shard"}
    after = pipe(state, X, LABELS).state
    assert pipe.dataflow(after, X, LABELS) is pipe.dataflow(state, X, LABELS)


def shifted(params, x):
    rows = jnp.roll(x * params["w"][None], 1, axis=0)
    return rows.at[0].set(params["w"])


@pytest.mark.slow
def test_what_xla_cuts_wrongly_equals_one_device(pw):
    strategy = strategies.fsdp(**SMALL)
    on = [pw.slice(4, axes=strategy.sizes(4)) for _ in range(2)]
    pipe = pw.pipeline(
        [shifted] * 2, lambda y, _: jnp.square(y).mean(), on, 1, strategy=strategy
    )
    params, x = [{"w": weights(8)}, {"w": weights(8)}], weights(16, 8)

    def of_batch(params):
        return jnp.square(shifted(params[1], shifted(params[0], x))).mean()

    found = pipe(pipe.init(params), x)
    wanted = jax.jit(jax.value_and_grad(of_batch))(params)
    for one, other in zip(
        jax.tree.leaves(found[:2]), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5)
