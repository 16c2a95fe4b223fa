import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from replicator import LocalSum
from replicator.base.mesh import replica_mesh
from replicator.base.trees import named_leaves
from replicator.collectives.context.microbatch import Microbatch, in_microbatch
from replicator.errors import ArgumentError
from replicator.nnx import (
    BatchNorm,
    params_of,
    value_and_grad,
    with_params,
    with_standing_statistics,
)
from tests.steps import replicas

OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class Mlp(nnx.Module):
    """A layer, a norm, dropout and a head: parameters, statistics and random keys."""

    def __init__(self, rngs, *, dropout=0.0, **norm):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = BatchNorm(4, rngs=rngs, **norm)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x, weight=None):
        x = self.norm(self.first(x), weight=weight)
        return self.head(self.dropout(jnp.tanh(x)))


def loss_fn(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def step_fn(state, batch):
    (loss, model), grads = value_and_grad(loss_fn)(state["model"], batch)
    loss, grads = jax.lax.pmean((loss, grads), "replica")
    params = params_of(model)
    updates, opt = OPTIMIZER.update(grads, state["opt"], params)
    model = with_params(model, optax.apply_updates(params, updates))
    return {"model": model, "opt": opt}, {"loss": loss}


@functools.cache
def compiled(replicas):
    return jax.jit(
        jax.shard_map(
            step_fn,
            mesh=replica_mesh(replicas),
            in_specs=(P(), P("replica")),
            out_specs=P(),
            check_vma=False,
        )
    )


@functools.cache
def init_state(**norm):
    model = Mlp(nnx.Rngs(0), **norm)
    return {"model": model, "opt": OPTIMIZER.init(params_of(model))}


@pytest.fixture
def batch(key):
    x, y = jax.random.split(key)
    return {"x": jax.random.normal(x, (16, 3)), "y": jax.random.normal(y, (16, 1))}


def assert_trees_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, leaf), (_, other) in zip(
        named_leaves(found), named_leaves(expected), strict=True
    ):
        np.testing.assert_allclose(leaf, other, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("choice", [{}, {"stats_batch": 4}])
@pytest.mark.parametrize("replicas", [2, 8])
def test_a_step_over_replicas_equals_one_device(batch, replicas, choice):
    state = init_state(**choice)
    one, one_metrics = compiled(1)(state, batch)
    many, metrics = compiled(replicas)(state, batch)
    np.testing.assert_allclose(metrics["loss"], one_metrics["loss"], rtol=1e-5)
    for norm in (one["model"].norm, many["model"].norm):
        assert not np.allclose(norm.mean[...], 0)
    assert_trees_close(params_of(many["model"]), params_of(one["model"]))
    stats = [nnx.state(state["model"], nnx.BatchStat) for state in (many, one)]
    assert_trees_close(*stats)


def test_a_step_learns(batch):
    state = init_state()
    losses = []
    for _ in range(30):
        state, metrics = compiled(4)(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]


def test_running_statistics_stay_equal_on_replicas_that_normalise_apart(key):
    norm = BatchNorm(3, stats="replica", rngs=nnx.Rngs(0))

    def fn(norm, x):
        norm(x)
        return norm.var[...][None]

    x = jax.random.normal(key, (8, 3)) * jnp.repeat(jnp.arange(1.0, 5.0), 2)[:, None]
    specs = {"in_specs": (P(), P("replica")), "out_specs": P("replica")}
    split = jax.shard_map(fn, mesh=replica_mesh(4), check_vma=False, **specs)
    var = jax.jit(split)(norm, x)
    np.testing.assert_array_equal(var, var[:1].repeat(4, axis=0))
    within = np.reshape(x, (4, 2, 3)).var(axis=1).mean(axis=0)
    np.testing.assert_allclose(var[0], 0.9 + 0.1 * within, rtol=1e-5)


@pytest.fixture
def pair():
    """Our norm and flax's, with the same settings."""
    theirs = nnx.BatchNorm(3, momentum=0.9, use_fast_variance=False, rngs=nnx.Rngs(0))
    return BatchNorm(3, rngs=nnx.Rngs(0)), theirs


def test_it_takes_the_place_of_the_norm_of_flax(pair, key):
    ours, theirs = pair
    for part in jax.random.normal(key, (3, 8, 2, 3)):
        np.testing.assert_allclose(ours(part), theirs(part), atol=1e-5)
    for norm in pair:
        norm.eval()
    np.testing.assert_allclose(ours(part), theirs(part), atol=1e-5)
    assert_trees_close(*[nnx.to_pure_dict(nnx.state(norm)) for norm in pair])


@pytest.mark.parametrize("freeze", [nnx.Module.eval, lambda norm: None])
def test_frozen_statistics_do_not_move(pair, key, freeze):
    norm, _ = pair
    x = jax.random.normal(key, (8, 3))
    norm(x)
    before = nnx.to_pure_dict(nnx.state(norm))
    freeze(norm)
    norm(5 * x, use_running_average=True)
    jax.tree.map(
        np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(norm)), before
    )


def test_a_view_changes_the_mode_and_not_the_module(pair):
    frozen = nnx.view(pair[0], use_running_average=True)
    assert frozen.use_running_average
    assert not pair[0].use_running_average


def test_half_precision_outputs_keep_single_precision_state(key):
    norm = BatchNorm(3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    y = norm(jax.random.normal(key, (8, 3), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(norm)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("use", [{"use_scale": False}, {"use_bias": False}])
def test_a_norm_may_lack_scale_or_bias(use, key):
    norm = BatchNorm(3, rngs=nnx.Rngs(0), **use)
    full = BatchNorm(3, rngs=nnx.Rngs(0))
    assert len(jax.tree.leaves(params_of(norm))) == 1
    x = jax.random.normal(key, (8, 3))
    np.testing.assert_array_equal(norm(x), full(x))


def test_padded_examples_change_nothing(batch):
    weight = jnp.arange(16) < 10
    padded, short = Mlp(nnx.Rngs(0)), Mlp(nnx.Rngs(0))
    y = padded(batch["x"], weight)
    np.testing.assert_allclose(y[:10], short(batch["x"][:10]), atol=1e-5)
    np.testing.assert_allclose(padded.norm.var[...], short.norm.var[...], rtol=1e-5)


def padded_trainer(rep, *, weighted=True, standing=False, **norm):
    """Train with a norm that is told of padding, or not."""
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        model = Mlp(nnx.Rngs(0), **norm)
        model = with_standing_statistics(model) if standing else model
        return {"model": model, "opt": optimizer.init(params_of(model))}

    def masked_loss(model, batch):
        y = model(batch["x"], batch["mask"] if weighted else None)
        apart = jnp.square(y - batch["y"])[:, 0] * batch["mask"]
        return LocalSum(apart.sum(), batch["mask"].sum())

    def step_fn(state, batch):
        (loss, model), grads = value_and_grad(masked_loss)(state["model"], batch)
        updates, opt = optimizer.update(grads, state["opt"], count=loss.weight)
        model = with_params(model, optax.apply_updates(params_of(model), updates))
        return {"model": model, "opt": opt}, {"loss": loss}

    return init_fn, step_fn


def norm_after_an_update(n, k, batch, real, **choice):
    rep = replicas(n)
    init_fn, step_fn = padded_trainer(rep, **choice)
    batch = {**batch, "mask": np.float32(np.arange(16) < real)}
    state, _ = rep.compile(step_fn, accumulate=k)(rep.init(init_fn), batch)
    return jax.device_get(state["model"].norm)


def assert_moved_once_by(norm, parts):
    """Compare with the mean over microbatches of their moments, each in NumPy."""
    mean, var = np.mean([(part.mean(0), part.var(0)) for part in parts], axis=0)
    np.testing.assert_allclose(norm.mean[...], 0.1 * mean, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(norm.var[...], 0.9 + 0.1 * var, rtol=1e-5)


def seen_by_the_norm(batch, examples, k):
    """Return the norm's inputs of each microbatch that holds one of the first few."""
    hidden = np.asarray(Mlp(nnx.Rngs(0)).first(batch["x"]), np.float64)
    cuts = np.arange(0, examples, 16 // k)[1:]
    return np.split(hidden[:examples], cuts)


@pytest.mark.parametrize(("n", "k"), [(1, 4), (4, 2), (2, 1)])
def test_padding_moves_running_statistics_as_if_it_were_not_there(batch, n, k):
    norm = norm_after_an_update(n, k, batch, 5)
    assert_moved_once_by(norm, seen_by_the_norm(batch, 5, k))


def test_microbatches_of_padding_alone_do_not_count_without_weights_either(batch):
    norm = norm_after_an_update(2, 4, batch, 5, weighted=False)
    assert_moved_once_by(norm, seen_by_the_norm(batch, 8, 4))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 2)])
def test_a_batch_of_padding_alone_moves_no_bit_of_the_running_statistics(batch, n, k):
    for standing in (False, True):
        norm = norm_after_an_update(n, k, batch, 0, standing=standing)
        np.testing.assert_array_equal(norm.mean[...], 0)
        np.testing.assert_array_equal(norm.var[...], 1)
        assert not standing or norm.batches[...] == 0


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("n", "k"), [(2, 2), (2, 1)])
def test_standing_statistics_count_a_padded_update_once(batch, n, k, weighted):
    norm = norm_after_an_update(n, k, batch, 4, weighted=weighted, standing=True)
    [kept] = seen_by_the_norm(batch, 4 if weighted else 16 // k, k)
    assert norm.batches[...] == 1
    np.testing.assert_allclose(norm.mean[...], kept.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norm.var[...], kept.var(0), rtol=1e-5)


def test_microbatches_move_running_statistics_once(pair, key):
    whole, split = pair[0], nnx.clone(pair[0])
    whole_x = jax.random.normal(key, (8, 3))
    whole(whole_x)
    for index, x in enumerate(jnp.split(whole_x, 2)):
        with in_microbatch(Microbatch(index=index, count=2)):
            split(x)
    np.testing.assert_allclose(split.mean[...], whole.mean[...], atol=1e-6)


def test_standing_statistics_average_every_batch_alike(key):
    model = Mlp(nnx.Rngs(0))
    model.eval()
    sampler = with_standing_statistics(model)
    batches = jax.random.normal(key, (4, 8, 3))
    for part in batches:
        sampler(part)
    hidden = np.stack([model.first(part) for part in batches])
    sampler.eval()
    sampler(100 * batches[0])
    np.testing.assert_allclose(sampler.norm.mean[...], hidden.mean((0, 1)), atol=1e-6)
    np.testing.assert_allclose(sampler.norm.var[...], hidden.var(1).mean(0), atol=1e-6)
    np.testing.assert_array_equal(model.norm.var[...], 1)  # a copy collected them


def test_gradients_are_those_of_a_pure_function(batch):
    model = Mlp(nnx.Rngs(0))

    def pure_loss(params):
        return loss_fn(with_params(model, params), batch)

    expected, expected_grads = jax.value_and_grad(pure_loss)(params_of(model))
    (loss, _), grads = value_and_grad(loss_fn)(model, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_trees_close(grads, expected_grads)


def test_the_loss_moves_a_copy_of_the_model(batch):
    model = Mlp(nnx.Rngs(0), dropout=0.5)
    (_, moved), _ = value_and_grad(loss_fn)(model, batch)
    np.testing.assert_array_equal(model.norm.mean[...], 0)
    assert np.abs(moved.norm.mean[...]).min() > 0
    assert moved.dropout.rngs is not None
    assert moved.dropout.rngs.count[...] == model.dropout.rngs.count[...] + 1
    assert jax.tree.structure(moved) == jax.tree.structure(model)


def test_a_loss_may_return_more(batch):
    def loss_and_outputs(model, batch):
        y = model(batch["x"])
        return jnp.square(y).mean(), y

    model = Mlp(nnx.Rngs(0))
    ((loss, y), _), _ = value_and_grad(loss_and_outputs, has_aux=True)(model, batch)
    np.testing.assert_allclose(loss, jnp.square(y).mean(), rtol=1e-6)


def test_parameters_come_back_as_they_left():
    model = Mlp(nnx.Rngs(0))
    doubled = with_params(model, jax.tree.map(lambda leaf: 2 * leaf, params_of(model)))
    np.testing.assert_array_equal(doubled.head.kernel[...], 2 * model.head.kernel[...])
    paths = [path for path, _ in named_leaves(params_of(model))]
    assert paths == [
        "first/bias",
        "first/kernel",
        "head/bias",
        "head/kernel",
        "norm/bias",
        "norm/scale",
    ]


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_a_momentum_out_of_range_is_refused(momentum):
    with pytest.raises(ArgumentError) as error:
        BatchNorm(3, momentum=momentum, rngs=nnx.Rngs(0))
    assert str(error.value) == (
        f"`momentum` must be in [0, 1), got {momentum}. "
        f"Use 0.9, or `eval()` to keep the running statistics as they are."
    )


def test_a_wrong_choice_of_statistics_is_refused_at_the_door():
    with pytest.raises(ArgumentError, match="`stats` must be 'all'"):
        BatchNorm(3, stats="batch", rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: BatchNorm("3", rngs=nnx.Rngs(0)), "`num_features` must be a whole"),
        (
            lambda: BatchNorm(3, rngs=nnx.Rngs(0))(jnp.ones((4, 5))),
            r"`x` must have 3 features in its last axis, got float32\[4,5\]",
        ),
        (lambda: params_of(3), "`model` must be a module of flax NNX, got `int`"),
        (lambda: value_and_grad(3), "`loss_fn` must be a function, got int"),
        (
            lambda: with_params(Mlp(nnx.Rngs(0)), {"first": {"kernel": 1.0}}),
            "must be named as in `params_of.*: `first/bias` is missing",
        ),
    ],
)
def test_what_does_not_belong_to_a_module_is_refused_by_name(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        wrong()
