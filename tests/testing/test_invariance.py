"""Law 1, by the helper that users have: what passes it, and what it must catch."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import replicator
from replicator import PerReplica, strategies, wrap_optimizer
from replicator.collectives.batch_norm import normalize
from replicator.collectives.moments import batch_moments, make_windows
from replicator.errors import ArgumentError, InvarianceError
from replicator.testing import assert_replica_invariant
from tests.steps import (
    adam,
    apply,
    conv,
    conv_loss,
    cross_entropy,
    dropout_trainer,
    errors,
    gan_trainer,
    image_batch,
    init_conv,
    lenient,
    mlp_loss,
    norm_trainer,
    regression_batch,
    trainer,
    weighted_trainer,
)

SGD = optax.sgd(0.05, momentum=0.9)

assert_invariant = functools.partial(
    assert_replica_invariant, replicas=(1, 8), accumulate=(1, 4), at_steps=(0, 1, 10)
)


def assert_all_checked(report, *, comparisons):
    assert len(report.comparisons) == comparisons
    assert report.left_out == ()
    assert all(each.difference <= each.tolerance for each in report.comparisons)


def test_an_mlp_obeys_the_law():
    init_fn, step_fn = trainer(wrap_optimizer(adam(1e-2)))
    report = assert_invariant(step_fn, init_fn, regression_batch(32))
    # Three settings besides one replica's, at three steps, and three trajectories.
    assert_all_checked(report, comparisons=3 * 3 + 3)


def test_cross_replica_batch_norm_by_pmean_obeys_the_law():
    init_fn, step_fn = norm_trainer(
        wrap_optimizer(SGD), lambda x: lax.pmean(x, "replica")
    )
    report = assert_invariant(step_fn, init_fn, image_batch(), accumulate=(1,))
    # The running mean reads the batch: a comparison of its own.
    assert_all_checked(report, comparisons=3 + 2)


def windowed_loss(params, batch, *, stats):
    y = conv(params, batch["image"])
    windows = make_windows(len(y), stats_batch=stats)
    y = jax.nn.relu(normalize(y, batch_moments(y, windows)))
    return cross_entropy(params, y, batch["label"])


@pytest.mark.slow
def test_batch_norm_over_fixed_windows_obeys_the_law_at_any_accumulation():
    loss_fn = functools.partial(windowed_loss, stats=8)
    init_fn, step_fn = trainer(wrap_optimizer(SGD), loss_fn, init_conv)
    report = assert_invariant(
        step_fn, init_fn, image_batch(32), replicas=(1, 8), accumulate=(1, 4)
    )
    assert_all_checked(report, comparisons=3 * 3 + 3)


def test_dropout_by_example_obeys_the_law_at_any_accumulation():
    init_fn, step_fn = dropout_trainer(wrap_optimizer(SGD))
    report = assert_invariant(
        step_fn, init_fn, regression_batch(32), replicas=(8,), at_steps=(0, 5)
    )
    assert_all_checked(report, comparisons=2 * (2 + 1))


def test_a_counter_of_replicas_is_caught():
    optimizer = wrap_optimizer(SGD)
    base_init, base_step = trainer(optimizer)

    def step_fn(state, batch):
        after, metrics = base_step(
            {name: state[name] for name in ("params", "opt")}, batch
        )
        return after | {"seen": state["seen"] + replicator.num_replicas()}, metrics

    def init_fn(key):
        return base_init(key) | {"seen": jnp.zeros((), jnp.int32)}

    assert "most at `seen`" in caught(step_fn, init_fn, at_steps=(2,))


def test_statistics_of_one_replica_are_caught():
    optimizer = wrap_optimizer(SGD)
    base_init, base_step = trainer(optimizer)

    def step_fn(state, batch):
        after, metrics = base_step(
            {name: state[name] for name in ("params", "opt")}, batch
        )
        return after | {"largest": replicator.all_reduce(batch["x"].max())}, metrics

    def init_fn(key):
        return base_init(key) | {"largest": jnp.zeros(())}

    message = caught(step_fn, init_fn, at_steps=(2,))
    assert message.startswith("float64 state that reads the batch must be the same")


def test_leaves_of_each_replica_are_named_as_left_out():
    optimizer = wrap_optimizer(SGD)
    base_init, base_step = trainer(optimizer)

    def step_fn(state, batch):
        after, metrics = base_step(
            {name: state[name] for name in ("params", "opt")}, batch
        )
        return after | {"own": PerReplica(batch["x"].sum())}, metrics

    report = assert_invariant(
        step_fn,
        lambda key: base_init(key) | {"own": PerReplica(jnp.zeros(()))},
        regression_batch(),
        accumulate=(1,),
        at_steps=(0,),
    )
    assert "not checked: `own`, a `PerReplica` leaf" in str(report)


def test_a_gan_obeys_the_law():
    parts = [wrap_optimizer(SGD, name=name) for name in ("generator", "critic")]
    init_fn, step_fn = gan_trainer(*parts)
    report = assert_invariant(
        step_fn, init_fn, regression_batch(32), replicas=(8,), accumulate=(4,)
    )
    assert_all_checked(report, comparisons=2 * 3 + 1)
    assert {each.what for each in report.comparisons} == {
        "gradient of `generator`",
        "gradient of `critic`",
        "float64 trajectory",
    }


def test_ragged_means_weighted_by_tokens_obey_the_law():
    batch = regression_batch(32)
    batch["mask"] = (np.arange(32) % 5 < 2).astype(np.float32)
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
    init_fn, step_fn = weighted_trainer(wrap_optimizer(lenient(tx)))
    report = assert_invariant(
        step_fn, init_fn, batch, replicas=(8,), accumulate=(4,), at_steps=(0, 5)
    )
    assert_all_checked(report, comparisons=2 + 1)


@pytest.mark.slow
def test_a_conv_net_obeys_the_full_law():
    init_fn, step_fn = trainer(
        wrap_optimizer(optax.sgd(0.05, momentum=0.9)), conv_loss, init_conv
    )
    report = assert_replica_invariant(step_fn, init_fn, image_batch(32))
    assert_all_checked(report, comparisons=11 * 4 + 11)


def caught(step_fn, init_fn, batch=None, **options):
    options = {"accumulate": (1,), "at_steps": (0,), **options}
    with pytest.raises(InvarianceError) as found:
        assert_invariant(step_fn, init_fn, batch or regression_batch(), **options)
    return str(found.value)


def test_a_sum_over_examples_is_caught():
    init_fn, step_fn = trainer(
        wrap_optimizer(SGD), lambda params, batch: errors(params, batch).sum()
    )
    message = caught(step_fn, init_fn)
    assert message.startswith(
        "gradient of `params` must be the same on one replica and on 8 at 1 "
        "microbatches, got a difference of "
    )


def test_a_sum_over_examples_is_caught_at_accumulation_alone():
    init_fn, step_fn = trainer(
        wrap_optimizer(SGD), lambda params, batch: errors(params, batch).sum()
    )
    message = caught(step_fn, init_fn, replicas=(1,), accumulate=(4,))
    assert "on 1 at 4 microbatches" in message


def test_unweighted_ragged_means_are_caught():
    batch = regression_batch()
    batch["mask"] = (np.arange(16) % 5 < 3).astype(np.float32)

    def loss_fn(params, batch):
        return (errors(params, batch) * batch["mask"]).sum() / batch["mask"].sum()

    init_fn, step_fn = trainer(wrap_optimizer(SGD), loss_fn)
    assert "on 8 at 1 microbatches" in caught(step_fn, init_fn, batch)


def test_a_loss_that_knows_its_replica_is_caught():
    def loss_fn(params, batch):
        return mlp_loss(params, batch) * (1.0 + replicator.replica_id().astype(float))

    init_fn, step_fn = trainer(wrap_optimizer(SGD), loss_fn)
    assert "must be the same" in caught(step_fn, init_fn)


def test_dropout_by_replica_is_caught():
    def keys(key, n):
        return jax.random.split(replicator.replica_key(key), n)

    init_fn, step_fn = dropout_trainer(wrap_optimizer(SGD), keys=keys)
    assert "must be the same" in caught(step_fn, init_fn)


def test_norm_per_replica_is_caught():
    def loss_fn(params, batch):
        y = conv(params, batch["image"])
        y = (y - y.mean((0, 1, 2), keepdims=True)) / (
            1e-3 + y.std((0, 1, 2), keepdims=True)
        )
        return cross_entropy(params, jax.nn.relu(y), batch["label"])

    init_fn, step_fn = trainer(wrap_optimizer(SGD), loss_fn, init_conv)
    assert "most at `" in caught(step_fn, init_fn, image_batch())


def test_a_wrong_update_after_right_gradients_is_caught():
    # The gradient is right everywhere; what is made of it counts replicas.
    optimizer = wrap_optimizer(SGD)
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        loss, grads = jax.value_and_grad(mlp_loss)(state["params"], batch)
        after = apply(optimizer, state, grads)
        decay = 1 - 1e-4 * replicator.num_replicas()
        shrunk = jax.tree.map(lambda leaf: leaf * decay, after["params"])
        return {**after, "params": shrunk}, {"loss": loss}

    message = caught(step_fn, init_fn, at_steps=(2,))
    assert message.startswith("float64 trajectory must be the same")


def fsdp_of_all(variables, devices):
    return strategies.fsdp(whole_below_bytes=0)


STRATEGIES = [
    strategies.zero1(whole_below_bytes=0),
    strategies.zero2(whole_below_bytes=0, replicas=2),
    strategies.fsdp(whole_below_bytes=0),
    strategies.hybrid(shard=4, whole_below_bytes=0),
    strategies.tensor_parallel(
        {"params/w1": (None, "model"), "params/w2": ("model",)}, model=4, replicas=2
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_a_strategy_that_partitions_obeys_the_law(strategy):
    init_fn, step_fn = trainer(wrap_optimizer(adam(1e-2)))
    options = {"at_steps": (0, 10), "strategy": strategy}
    report = assert_invariant(step_fn, init_fn, regression_batch(32), **options)
    assert_all_checked(report, comparisons=3 * 2 + 3 + 2)  # two report a loss
    over = {each.strategy for each in report.comparisons if each.replicas > 1}
    assert over == {strategy.name}


def test_a_builder_of_strategies_is_compared_with_one_device():
    init_fn, step_fn = trainer(wrap_optimizer(SGD))
    options = {"accumulate": (1,), "at_steps": (0,), "strategy": fsdp_of_all}
    report = assert_invariant(step_fn, init_fn, regression_batch(), **options)
    assert_all_checked(report, comparisons=2)
    assert {each.strategy for each in report.comparisons} == {"fsdp"}


def test_an_unmodified_step_is_compared_by_its_trajectory():
    init_fn, step_fn = trainer(lenient(optax.adam(1e-2)))
    options = {"accumulate": (1,), "at_steps": (3,), "strategy": fsdp_of_all}
    report = assert_invariant(step_fn, init_fn, regression_batch(), **options)
    assert all(each.difference <= each.tolerance for each in report.comparisons)
    assert "(8 devices under fsdp, 1 microbatches, step 3)" in str(report)
    assert "not checked: gradients" in str(report)


def test_what_an_unmodified_step_and_a_strategy_cannot_do_is_left_out():
    # The defaults of both, as in the page of strategies; one that fits 4 and 8 devices.
    init_fn, step_fn = trainer(lenient(optax.adam(1e-2)))
    strategy = strategies.hybrid(shard=4, whole_below_bytes=0)
    report = assert_replica_invariant(
        step_fn, init_fn, regression_batch(), at_steps=(1,), strategy=strategy
    )
    assert {(each.replicas, each.accumulate) for each in report.comparisons} == {
        (4, 1),
        (8, 1),
    }
    named = [line.partition(":")[0] for line in report.left_out]
    assert named == [
        "replicas=2",
        "accumulate=2",
        "accumulate=4",
        "gradients",
    ]


@pytest.mark.parametrize("of", ["metric", "state"])
def test_what_a_strategy_reports_and_keeps_is_compared_too(of):
    start, train = trainer(wrap_optimizer(SGD))
    turns = itertools.count(1)  # another number in each program

    def init_fn(key):
        return start(key) | {"turn": jnp.zeros(())}

    def step_fn(state, batch):
        after, metrics = train(state, batch)
        found = {"turn": batch["y"].sum() * next(turns)}
        if of == "state":
            return after | found, metrics
        return after, metrics | found

    options = {"replicas": (2,), "accumulate": (1,), "at_steps": (1,)}
    with pytest.raises(InvarianceError, match=r"`turn`.*writes and shifts.*another st"):
        assert_replica_invariant(
            step_fn, init_fn, regression_batch(), strategy=strategies.fsdp(), **options
        )


def test_a_strategy_that_fits_no_number_of_devices_asked_for_is_refused():
    init_fn, step_fn = trainer(lenient(optax.adam(1e-2)))
    options = {"replicas": (1, 2), "strategy": strategies.hybrid(shard=4)}
    with pytest.raises(ArgumentError, match="`strategy` must fit 2 devices"):
        assert_invariant(step_fn, init_fn, regression_batch(), **options)


def test_the_report_says_what_was_checked():
    init_fn, step_fn = trainer(wrap_optimizer(SGD))
    report = assert_invariant(
        step_fn, init_fn, regression_batch(), accumulate=(1,), at_steps=(0, 2)
    )
    gradients, trajectory = str(report).splitlines()
    assert gradients.startswith("gradient of `params`: 2 comparisons; largest")
    assert "of 1.1e-05 allowed" in gradients
    assert trajectory.startswith("float64 trajectory: 1 comparisons; largest")
    assert "of 1.0e-09 allowed" in trajectory


def test_the_report_says_what_a_step_in_float32_alone_leaves_out():
    optimizer = wrap_optimizer(optax.sgd(0.1))
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        x = batch["x"] * jnp.float32(1)  # strict promotion refuses it in float64
        grads = jax.grad(mlp_loss)(state["params"], {**batch, "x": x})
        return apply(optimizer, state, grads), {}

    report = assert_invariant(
        step_fn, init_fn, regression_batch(), accumulate=(1,), at_steps=(0,)
    )
    assert len(report.comparisons) == 1
    assert "not checked: float64 trajectories" in str(report)


def test_a_step_without_a_wrapped_optimizer_is_refused():
    with pytest.raises(ArgumentError, match="holds no wrapped optimizer"):
        assert_invariant(
            lambda state, batch: (state, {}),
            lambda key: {"w": jnp.ones(())},
            regression_batch(),
        )
