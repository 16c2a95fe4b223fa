import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models.transformer import (
    TENSOR_PARALLEL,
    Transformer,
    attend,
    next_token_nats,
)
from replicator import Replicator, strategies
from replicator.errors import ArgumentError
from replicator.nnx import params_of, value_and_grad, with_params
from replicator.testing import assert_replica_invariant
from replicator.testing.invariance import GRADIENT_TOLERANCE
from tests.steps import assert_close, lenient, replicas

SIZES = {"vocabulary": 16, "layers": 2, "width": 16, "heads": 4, "context": 8}
OTHER = {"positions": "learned", "tied": False}
LLAMA = {"heads": 8, "kv_heads": 4, "mlp": "swiglu", "tied": False}
GPT2 = {"norm": "layer", "bias": True, "positions": "learned"}


def make(seed=0, **options):
    return Transformer(**{**SIZES, **options}, rngs=nnx.Rngs(seed))


def draw(*shape):
    tokens = np.random.default_rng(0).integers(0, 16, shape)
    return jnp.asarray(tokens, jnp.int32)


def mean_loss(model, tokens):
    return next_token_nats(model, tokens).mean()


@pytest.mark.parametrize("options", [{}, OTHER, LLAMA, GPT2], ids=str)
def test_a_token_sees_none_that_comes_later(options):
    model, tokens = jax.jit(make(**options)), draw(2, 8)
    changed = tokens.at[:, 5:].set(15 - tokens[:, 5:])
    before, after = model(tokens), model(changed)

    np.testing.assert_allclose(after[:, :5], before[:, :5], atol=1e-6)
    assert (np.abs(after - before)[:, 5:].max(axis=-1) > 1e-4).all()


def test_a_token_sees_all_that_came_before():
    model, tokens = jax.jit(make()), draw(2, 8)
    changed = tokens.at[:, 0].set(15 - tokens[:, 0])

    assert (np.abs(model(changed) - model(tokens)).max(axis=-1) > 1e-6).all()


@pytest.mark.parametrize(
    "options",
    [
        *({"remat": True}, {"scan": False}, {"scan": False, "remat": True}),
        {"remat": "dots"},
    ],
    ids=str,
)
def test_how_layers_run_changes_no_gradient(options):
    tokens = draw(2, 9)
    found, expected = (
        jax.jit(lambda model: value_and_grad(mean_loss)(model, tokens)[1])(model)
        for model in (make(**options), make())
    )
    assert_close(found, expected, rtol=1e-5)


def test_attention_in_blocks_is_attention(monkeypatch):
    monkeypatch.setattr("models.attention._BLOCK", 4)
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.normal(size=(2, 12, 4, 8)), jnp.float32)
    key, value = jnp.asarray(rng.normal(size=(2, 2, 12, 2, 8)), jnp.float32)

    def loss(query, key, value, kernel):
        return (attend(query, key, value, kernel=kernel) ** 2).sum()

    (found, grads), (expected, others) = (
        jax.jit(jax.value_and_grad(loss, (0, 1, 2)), static_argnums=3)(
            query, key, value, kernel
        )
        for kernel in ("blocks", "xla")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for one, other in zip(grads, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_heads_may_be_wider_than_their_share_of_the_width():
    model = nnx.eval_shape(lambda: make(heads=2, head_size=24))
    params = params_of(model)["blocks"]
    assert params["qkv"]["kernel"].shape[1:] == (16, 3, 2, 24)
    assert params["out"]["kernel"].shape[1:] == (2, 24, 16)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_attention_weighs_values_by_products_with_keys(dtype):
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 1, 5, 1, 4)).astype(dtype)
    products = query[0, :, 0] @ key[0, :, 0].T / 2
    weights = np.tril(np.exp(products))
    expected = weights / weights.sum(axis=1, keepdims=True) @ value[0, :, 0]

    with jax.enable_x64(dtype == np.float64):
        found = attend(*map(jnp.asarray, (query, key, value)))
    assert found.dtype == dtype
    tolerance = 10 * np.finfo(dtype).eps
    np.testing.assert_allclose(found[0, :, 0], expected, tolerance, tolerance)


def test_heads_of_a_group_share_the_key_and_value_beside_them():
    shared, apart = make(kv_heads=2, mlp="swiglu"), make(mlp="swiglu")
    params = params_of(shared)
    kernel = params["blocks"]["qkv"]["kernel"]  # layers, width, group + 2, groups, size
    query = kernel[:, :, :2].swapaxes(2, 3).reshape(2, 16, 1, 4, 4)
    pairs = jnp.repeat(kernel[:, :, 2:], 2, axis=3)
    params["blocks"]["qkv"]["kernel"] = jnp.concatenate([query, pairs], axis=2)
    apart, tokens = with_params(apart, params), draw(2, 8)

    found, expected = jax.jit(shared)(tokens), jax.jit(apart)(tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_heads_share_in_double_precision_too():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        query = jnp.asarray(rng.normal(size=(1, 5, 4, 4)))
        key, value = (jnp.asarray(rng.normal(size=(1, 5, 2, 4))) for _ in range(2))
        found = attend(query, key, value)
        single = attend(*(each.astype(np.float32) for each in (query, key, value)))
    np.testing.assert_allclose(found, single, rtol=1e-4, atol=1e-5)


def test_half_precision_keeps_parameters_and_logits_in_single():
    model = nnx.eval_shape(lambda: make(compute_dtype=jnp.bfloat16))
    stream, logits = jax.eval_shape(
        lambda model, tokens: (model.embed(tokens), model(tokens)), model, draw(2, 8)
    )
    assert (stream.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("float32")}


def test_parameters_of_layers_are_stacked_and_drawn_apart():
    up = params_of(make())["blocks"]["up"]["kernel"]

    assert up.shape == (2, 16, 64)
    assert not np.array_equal(up[0], up[1])


def test_a_new_network_knows_nothing():
    loss = mean_loss(make(), draw(2, 9))
    assert abs(float(loss) - np.log(16)) < 0.5


def trainer(rep, **options):
    """Return `init_fn` and `step_fn`; the optimizer's state is the gradient."""
    tx = lenient(optax.chain(optax.trace(0.9), optax.scale(-0.1)))
    optimizer = rep.wrap_optimizer(tx, name="model")

    def init_fn(key):
        model = Transformer(**{**SIZES, **options}, rngs=nnx.Rngs(key))
        return {"model": model, "opt": optimizer.init(params_of(model))}

    def step_fn(state, batch):
        (loss, model), grads = value_and_grad(mean_loss)(
            state["model"], batch["tokens"]
        )
        params = params_of(model)
        updates, opt = optimizer.update(grads, state["opt"], params)
        model = with_params(model, optax.apply_updates(params, updates))
        return {"model": model, "opt": opt}, {"loss": loss}

    return init_fn, step_fn


def after_a_step(rep, **options):
    init_fn, step_fn = trainer(rep, **options)
    state, _ = rep.compile(step_fn)(rep.init(init_fn, seed=0), {"tokens": draw(8, 9)})
    return jax.device_get(state)


@functools.cache
def on_one_device(**options):
    return after_a_step(replicas(1), **options)


CUT = {"whole_below_bytes": 0}
STRATEGIES = {
    "data_parallel": strategies.data_parallel(),
    "zero1": strategies.zero1(**CUT),
    "zero2": strategies.zero2(replicas=2, **CUT),
    "fsdp": strategies.fsdp(**CUT),
    "hybrid": strategies.hybrid(shard=4, **CUT),
    "tensor_parallel": strategies.tensor_parallel(TENSOR_PARALLEL, model=4, replicas=2),
}
KINDS = {
    **{"rotary": {}, "learned": OTHER, "remat": {"remat": True}},
    **{"llama": LLAMA, "dots": {**LLAMA, "remat": "dots"}, "gpt2": GPT2},
}


def assert_gradient_of_one_device(name, options):
    rep = Replicator(strategy=STRATEGIES[name], compilation_cache=False)
    found, expected = after_a_step(rep, **options), on_one_device(**options)

    assert_close(found["opt"], expected["opt"], rtol=GRADIENT_TOLERANCE)
    assert_close(found["model"], expected["model"], rtol=1e-5)


@pytest.mark.parametrize("name", ["fsdp", "tensor_parallel"])
def test_a_step_has_the_gradient_of_one_device(name):
    assert_gradient_of_one_device(name, {})


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_each_kind_has_the_gradient_of_one_device_under_every_strategy(name, kind):
    assert_gradient_of_one_device(name, KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "fsdp",
        pytest.param("data_parallel", marks=pytest.mark.nightly),
        pytest.param("tensor_parallel", marks=pytest.mark.nightly),
    ],
)
def test_the_answer_is_that_of_one_device_in_double_precision_too(name):
    init_fn, step_fn = trainer(replicas(1))
    report = assert_replica_invariant(
        step_fn,
        init_fn,
        {"tokens": draw(8, 9)},
        replicas=(1, 8),
        accumulate=(1,),
        at_steps=(0, 3),
        strategy=STRATEGIES[name],
    )
    assert not report.left_out


@pytest.mark.parametrize("options", [{}, OTHER, LLAMA, GPT2], ids=str)
def test_heads_hidden_features_and_tables_are_cut_for_tensor_parallelism(options):
    init_fn, _ = trainer(replicas(1), **options)
    found = strategies.variables_made_by(init_fn)
    cut = strategies.tensor_parallel(TENSOR_PARALLEL)
    placed = {each.path: cut.place(each, cut.sizes(4)).stored for each in found}
    whole = {path for path, axes in placed.items() if not any(axes)}

    assert whole
    kept = ("norm", "positions", "bias")
    assert all(any(name in path for name in kept) for path in whole)


REFUSALS = {
    "kv_heads": ({"kv_heads": 3}, "`kv_heads` must divide the 4 heads, got 3. Use 1."),
    "mlp": ({"mlp": "relu"}, "`mlp` must be one of 'gelu', 'swiglu', got 'relu'."),
    "norm": ({"norm": "none"}, "`norm` must be one of 'rms', 'layer', got 'none'."),
    "remat": (
        {"remat": "all"},
        "`remat` must be True, False or 'dots', got 'all'. Pass one of these.",
    ),
    "layers": ({"layers": 0}, "`layers` must be at least 1, got 0. Use 1."),
    "positions": (
        {"positions": "none"},
        "`positions` must be one of 'rotary', 'learned', got 'none'.",
    ),
    "heads": (
        {"width": 20},
        "`width` must be a multiple of 8 for 4 heads with rotary positions, got 20. "
        "Use 24.",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_network_that_cannot_be_is_refused(what):
    options, message = REFUSALS[what]
    with pytest.raises(ArgumentError) as error:
        make(**options)
    assert str(error.value).startswith(message)


def test_a_sequence_longer_than_the_context_is_refused():
    model = nnx.eval_shape(make)
    with pytest.raises(ArgumentError, match="at most 8, got 9"):
        jax.eval_shape(model, draw(1, 9))
