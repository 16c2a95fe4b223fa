"""A random key that all replicas share, where each wanted its own, is warned of."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax

import replicator
from replicator import SharedRandomKeyWarning, strategies
from tests.engine.analysis.test_replication_check import line_of, prove
from tests.steps import (
    FEATURES,
    adam,
    apply,
    dropout_trainer,
    mlp_loss,
    regression_batch,
    replicas,
    trainer,
)


def shared(key, n):
    return jax.random.split(key, n)


def test_a_dropout_mask_shared_by_all_replicas_is_warned_of():
    rep = replicas(8)
    init_fn, step_fn = dropout_trainer(rep.wrap_optimizer(adam()), keys=shared)
    with pytest.warns(
        SharedRandomKeyWarning, match="every replica draws the same random numbers at"
    ) as found:
        prove(step_fn, init_fn, regression_batch(), jax.random.key(0))
    assert len(found) == 1
    assert re.search(r"steps\.py:\d+ in (<lambda>|loss_fn)", str(found[0].message))


def warned(step_fn, *arguments, **options):
    """Prove `step_fn`; return the lines that it is warned of."""
    with pytest.warns(SharedRandomKeyWarning) as found:
        prove(step_fn, *arguments, key=jax.random.key(0), **options)
    messages = [str(each.message) for each in found]
    return [re.search(r" at (\S+ in [^.]*)\.", each)[1] for each in messages]


def from_examples(value_fn):
    """Return a step that reports `value_fn(x, w, key)`; x [n, 6], w [6, 6]."""

    def step_fn(state, batch, key):
        return state, {"x": value_fn(batch["x"], state["w"], key).mean()}

    return step_fn


STATE = {"w": np.eye(6, dtype=np.float32)}
BATCH = {"x": np.ones((24, 6), np.float32)}  # three examples on each of eight replicas


def normal(key, *shape):
    return jax.random.normal(key, shape)


def appended(x, w, key):
    return jnp.concatenate([x, normal(key, len(x), 2)], axis=1) ** 2


def stacked(x, w, key):
    return jnp.concatenate([x, normal(key, 5, 6) @ w])


def masked(x, w, key):
    return jnp.einsum("bf,bfh->bh", x, normal(key, len(x), 6, 2))


def mixed(x, w, key):
    return jnp.einsum("bc,cf->bf", normal(key, len(x), len(x)), x)


def chosen(x, w, key):
    return jnp.where(x > 0, x, normal(key, *x.shape))


def compared(x, w, key):
    return jax.random.bernoulli(key, jax.nn.sigmoid(x)).astype(jnp.float32)


def sampled(x, w, key):
    return jax.random.categorical(key, x @ w).astype(jnp.float32)


def shuffled(x, w, key):
    return jax.random.permutation(key, x) * x


def replaced(x, w, key):
    return x.at[jax.random.randint(key, (2,), 0, len(x))].set(0.0)


def drawn_around(x, w, key):
    return jax.random.gamma(key, jnp.exp(x))


def scaled_by_weights(x, w, key):
    return x + jnp.exp(w[:1]) * normal(key, *x.shape)


def in_a_scan(x, w, key):
    noise = normal(key, *x.shape)
    return jax.lax.scan(lambda c, pair: (c, pair[0] * pair[1]), 0.0, (x, noise))[1]


MEETINGS = [
    *(appended, stacked, masked, mixed, chosen, compared, sampled, shuffled),
    *(replaced, drawn_around, scaled_by_weights, in_a_scan),
]


@pytest.mark.parametrize("value_fn", MEETINGS)
def test_shared_numbers_that_meet_examples_are_warned_of(value_fn):
    [line] = warned(from_examples(value_fn), STATE, BATCH)
    assert re.search(rf"in (<lambda>|{value_fn.__name__}|normal)$", line)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("count", [1, 8])
def test_a_mask_shared_by_replicas_and_microbatches_is_warned_of(count, accumulate):
    rep = replicas(count)
    init_fn, step_fn = dropout_trainer(rep.wrap_optimizer(adam()), keys=shared)
    step = rep.compile(step_fn, accumulate=accumulate)
    batch, state = regression_batch(48), rep.init(init_fn)
    with pytest.warns(SharedRandomKeyWarning) as found:
        step.lower(state, batch, jax.random.key(0))
    assert len(found) == 1


CUTTING = [strategies.fsdp(), strategies.zero1(), strategies.zero2()]


@pytest.mark.parametrize("strategy", CUTTING, ids=lambda each: each.name)
def test_a_mask_shared_by_microbatches_is_warned_of_under_a_strategy(strategy):
    rep = replicas(4, strategy=strategy)
    init_fn, step_fn = dropout_trainer(rep.wrap_optimizer(adam()), keys=shared)
    step, state = rep.compile(step_fn, accumulate=2), rep.init(init_fn)
    with pytest.warns(
        SharedRandomKeyWarning, match="every microbatch draws the same random numbers"
    ) as found:
        step.lower(state, regression_batch(48), jax.random.key(0))
    assert len(found) == 1
    assert re.search(r"steps\.py:\d+ in (<lambda>|loss_fn)", str(found[0].message))


def lower_under_strategy(value_fn):
    """Lower a step of two microbatches whose loss is the mean of `value_fn`."""
    rep = replicas(4, strategy=strategies.fsdp())
    tx = rep.wrap_optimizer(optax.sgd(0.1))

    def step_fn(state, batch, key):
        def loss_fn(w):
            return value_fn(batch["x"], w, key).mean()

        after = apply(tx, state, jax.grad(loss_fn)(state["params"]))
        return after, {"x": loss_fn(state["params"])}

    state = {"params": STATE["w"], "opt": tx.init(STATE["w"])}
    rep.compile(step_fn, accumulate=2).lower(state, BATCH, jax.random.key(0))


@pytest.mark.parametrize("value_fn", MEETINGS)
def test_shared_numbers_that_meet_examples_of_a_strategy_are_warned_of(value_fn):
    with pytest.warns(SharedRandomKeyWarning, match="every microbatch") as found:
        lower_under_strategy(value_fn)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("keys", "accumulate"), [(shared, 1), (replicator.example_keys, 2)]
)
def test_numbers_of_each_example_give_no_warning_under_a_strategy(keys, accumulate):
    rep = replicas(4, strategy=strategies.fsdp())
    init_fn, step_fn = dropout_trainer(rep.wrap_optimizer(adam()), keys=keys)
    step, state = rep.compile(step_fn, accumulate=accumulate), rep.init(init_fn)
    step.lower(state, regression_batch(48), jax.random.key(0))


def generator_trainer(optimizer, latents, *, with_examples=False):
    """Train a generator on latents that `latents(key)` draws; no example is seen."""

    def loss_fn(params, batch, key):
        fake = jnp.tanh(latents(key, len(batch["x"])) @ params["w"] + params["b"])
        loss = jax.nn.softplus(-fake.sum(1)).mean()
        return loss + jnp.square(batch["x"] @ params["w"]).mean() * float(with_examples)

    def init_fn(key):
        params = {"w": jnp.ones((FEATURES, FEATURES)), "b": jnp.zeros((1, FEATURES))}
        return {"params": params, "opt": optimizer.init(params)}

    def step_fn(state, batch, key):
        grads = jax.grad(loss_fn)(state["params"], batch, key)
        return apply(optimizer, state, grads), {}

    return init_fn, step_fn


@pytest.mark.parametrize("latents", [lambda key, n: normal(key, n, FEATURES)])
@pytest.mark.parametrize("with_examples", [False, True])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_latents_that_all_replicas_share_are_warned_of(latents, with_examples, options):
    rep = replicas(8)
    init_fn, step_fn = generator_trainer(
        rep.wrap_optimizer(adam()), latents, with_examples=with_examples
    )
    [line] = warned(step_fn, init_fn, regression_batch(64), **options)
    assert line.endswith("in normal")


@pytest.mark.parametrize("with_examples", [False, True])
def test_latents_that_microbatches_share_are_warned_of(with_examples):
    rep = replicas(4, strategy=strategies.fsdp())
    init_fn, step_fn = generator_trainer(
        rep.wrap_optimizer(adam()),
        lambda key, n: normal(key, n, FEATURES),
        with_examples=with_examples,
    )
    step, state = rep.compile(step_fn, accumulate=2), rep.init(init_fn)
    with pytest.warns(SharedRandomKeyWarning, match="every microbatch") as found:
        step.lower(state, regression_batch(64), jax.random.key(0))
    assert len(found) == 1


def test_latents_of_any_number_are_warned_of():
    init_fn, step_fn = generator_trainer(
        replicas(8).wrap_optimizer(adam()), lambda key, n: normal(key, 5, FEATURES)
    )
    assert len(warned(step_fn, init_fn, regression_batch())) == 1


def test_latents_that_a_critic_sees_beside_examples_are_warned_of():
    optimizer = replicas(8).wrap_optimizer(adam())

    def critic_loss(critic, generator, batch, key):
        fake = normal(key, 5, FEATURES) @ generator
        real = jax.nn.softplus(-batch["x"] @ critic).mean()
        return real + jax.nn.softplus(fake @ critic).mean()

    def step_fn(state, batch, key):
        grads = jax.grad(critic_loss)(state["params"], state["generator"], batch, key)
        return apply(optimizer, state, grads), {}

    params = jnp.ones((FEATURES,))
    generator = jnp.ones((FEATURES, FEATURES))
    state = {"params": params, "opt": optimizer.init(params), "generator": generator}
    assert len(warned(step_fn, state, regression_batch())) == 1


def test_latents_with_weights_that_vary_are_warned_of():
    optimizer = replicas(8).wrap_optimizer(adam())

    def step_fn(state, batch, key):
        w = state["params"]
        grads = jax.grad(lambda w: (normal(key, 5, FEATURES) @ w).sum())(w)
        return apply(optimizer, state, grads, weight=batch["y"].sum()), {}

    params = jnp.ones((FEATURES,))
    state = {"params": params, "opt": optimizer.init(params)}
    assert len(warned(step_fn, state, regression_batch())) == 1


def test_one_line_is_warned_of_once():
    def value_fn(x, w, key):
        first, second = (normal(each, *x.shape) for each in jax.random.split(key))
        return x * first + x * second

    assert len(warned(from_examples(value_fn), STATE, BATCH)) == 1


def add_noise(state, batch, key):
    noise = jax.random.normal(key, batch["x"].shape)
    return state, {"x": (batch["x"] + noise).mean()}


def choose(state, batch, key):
    heads = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return state, {"x": jnp.where(heads, batch["x"], 0.0).mean()}


def draw_with_legacy_key(state, batch, key):
    noise = jax.random.normal(jax.random.PRNGKey(0), batch["x"].shape)
    return state, {"x": (batch["x"] * noise).mean()}


@pytest.mark.parametrize("step_fn", [add_noise, choose, draw_with_legacy_key])
def test_shared_noise_on_examples_is_warned_of(step_fn):
    with pytest.warns(SharedRandomKeyWarning) as found:
        prove(step_fn, {"w": jnp.ones(())}, key=jax.random.key(0))
    assert f"{line_of(step_fn, 'jax.random.')}. Use" in str(found[0].message)


# Warnings are errors here: these tests fail if one appears.


@pytest.mark.parametrize("accumulate", [1, 2])
def test_keys_by_example_give_no_warning(accumulate):
    rep = replicas(8)
    init_fn, step_fn = dropout_trainer(rep.wrap_optimizer(adam()))
    prove(
        step_fn, init_fn, regression_batch(), jax.random.key(0), accumulate=accumulate
    )


def test_keys_by_replica_give_no_warning():
    def step_fn(state, batch, key):
        noise = jax.random.normal(replicator.replica_key(key), batch["x"].shape)
        return state, {"x": (batch["x"] + noise).mean()}

    prove(step_fn, {"w": jnp.ones(())}, key=jax.random.key(0))


def test_noise_on_weights_gives_no_warning():
    rep = replicas(8)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch, key):
        noise = jax.random.normal(key, state["params"]["w1"].shape)
        params = {**state["params"], "w1": state["params"]["w1"] + 0.1 * noise}
        grads = jax.grad(mlp_loss)(params, batch)
        return apply(optimizer, state, grads), {}

    prove(step_fn, init_fn, regression_batch(), jax.random.key(0))


# Weights are the same for all examples, and so is noise on them: one device draws it
# once for its batch, too.


def noisy_weights(x, w, key):
    return x @ (w + normal(key, 6, 6))


def noisy_biases(x, w, key):
    return x @ w + (w[:1] + normal(key, 1, 6))


def dropped_weights(x, w, key):
    return x @ (w * jax.random.bernoulli(key, 0.5, w.shape).astype(w.dtype))


def projected_weights(x, w, key):
    return x @ (normal(key, 6, 9) @ normal(key, 9, 6) @ w)


def normalised_weights(x, w, key):
    v = w @ normal(key, 6)
    return x @ (w / jnp.linalg.norm(w.T @ (v / jnp.linalg.norm(v))))


def projected_examples(x, w, key):
    return x @ normal(key, 6, 9)


def as_long_as_the_batch(x, w, key):
    params = {"w": w[:, :3], "b": w[:1, :3]}
    keys = dict(zip("wb", jax.random.split(key), strict=True))
    w, b = (params[k] + jax.random.normal(keys[k], params[k].shape) for k in "wb")
    return (x @ w + b) @ (params["w"].T + normal(key, 3, 6))


def thrown_for_all(x, w, key):
    return jnp.where(jax.random.bernoulli(key), x, x[:, ::-1])


def cropped_for_all(x, w, key):
    return jax.lax.dynamic_slice(x, (0, jax.random.randint(key, (), 0, 3)), (3, 2))


def of_a_slice(x, w, key):
    noise = normal(key, 24, 6)
    return x + jax.lax.dynamic_slice(noise, (replicator.replica_id() * 3, 0), (3, 6))


def promised(x, w, key):
    return x * replicator.assume_replicated(normal(key, *x.shape))


def by_example(x, w, key):
    keys = replicator.example_keys(key, len(x))
    return x * jax.vmap(lambda key: normal(key, 6))(keys)


NO_MEETINGS = [
    *(noisy_weights, noisy_biases, dropped_weights, projected_weights),
    *(normalised_weights, projected_examples, as_long_as_the_batch, thrown_for_all),
    *(cropped_for_all, of_a_slice, promised, by_example),
]


@pytest.mark.parametrize("value_fn", NO_MEETINGS)
def test_numbers_that_all_should_share_give_no_warning(value_fn):
    prove(from_examples(value_fn), STATE, BATCH, jax.random.key(0))


# Not what asks for a replica; nor a mask on weights, which meets gradients in the
# backward pass and is warned of there, as it is on replicas.
LOSSES = [f for f in NO_MEETINGS if f not in (of_a_slice, dropped_weights)]


@pytest.mark.parametrize("value_fn", LOSSES)
def test_numbers_that_microbatches_should_share_give_no_warning(value_fn):
    lower_under_strategy(value_fn)


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_noise_on_updates_gives_no_warning(steps_per_call):
    optimizer = replicas(8).wrap_optimizer(optax.sgd(0.1))
    init_fn, train = trainer(optimizer)

    def step_fn(state, batch, key):
        after, _ = train(state, batch)
        noise = {k: normal(key, *p.shape) for k, p in after["params"].items()}
        params = jax.tree.map(jnp.add, after["params"], noise)
        return {**after, "params": params}, {"noise": optax.tree.norm(noise)}

    batch, key = regression_batch(), jax.random.key(0)
    if steps_per_call > 1:
        batch = jax.tree.map(lambda leaf: np.stack([leaf] * 2), batch)
        key = jax.random.split(key)
    prove(step_fn, init_fn, batch, key, steps_per_call=steps_per_call)


def test_latents_of_each_example_give_no_warning():
    init_fn, step_fn = generator_trainer(
        replicas(8).wrap_optimizer(adam()),
        lambda key, n: jax.vmap(lambda key: normal(key, FEATURES))(
            replicator.example_keys(key, n)
        ),
    )
    prove(step_fn, init_fn, regression_batch(), jax.random.key(0), accumulate=2)


def test_noise_on_reduced_gradients_gives_no_warning():
    def step_fn(state, batch, key):
        mean = lax.pmean(batch["x"].mean(), "replica")
        return {"w": state["w"] + mean + jax.random.normal(key, ())}, {}

    prove(step_fn, {"w": jnp.ones(())}, key=jax.random.key(0))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_signs_of_a_hutchinson_estimate_give_no_warning(accumulate):
    estimate: Any = optax.contrib.hutchinson_estimator_diag_hessian()
    init_fn, train = trainer(replicas(8).wrap_optimizer(adam()))

    def step_fn(state, batch):
        own, _ = estimate.update(
            None, state["signs"], state["params"], lambda w: mlp_loss(w, batch)
        )
        curvature = replicator.all_reduce(own)
        after, metrics = train({k: state[k] for k in ("params", "opt")}, batch)
        return after | {"signs": state["signs"]}, metrics | {
            "of": curvature["w2"].sum()
        }

    def init(key):
        return init_fn(key) | {"signs": estimate.init(None)}

    prove(step_fn, init, regression_batch(48), accumulate=accumulate)
