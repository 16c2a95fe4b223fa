"""k microbatches make one update: one batch's gradient, one reduction, no buffer."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import replicator
from replicator import Max, Mean, PerReplica, Sum
from replicator.base.flat_tree import FlatTree
from replicator.engine.analysis.dataflow import over_axis, sub_jaxprs
from replicator.engine.step.transforms import lift
from replicator.errors import ArgumentError
from tests.steps import (
    adam,
    apply,
    assert_close,
    dropout_trainer,
    errors,
    gan_trainer,
    init_mlp,
    lenient,
    mlp_loss,
    params_after,
    regression_batch,
    replicas,
    trainer,
    weighted_trainer,
)


def sgd_step(n, accumulate, make=trainer):
    rep = replicas(n)
    init_fn, step_fn = make(rep.wrap_optimizer(optax.sgd(0.1)))
    return rep.compile(step_fn, accumulate=accumulate), rep.init(init_fn)


def collectives(jaxpr, inside=()):
    """List each collective over replicas with the primitives that it lies in."""
    found = []
    for eqn in jaxpr.eqns:
        if over_axis(eqn, "replica") and eqn.primitive.name != "axis_index":
            found.append((eqn.primitive.name, inside))
        for sub in sub_jaxprs(eqn):
            found += collectives(sub, (*inside, eqn.primitive.name))
    return found


@pytest.mark.parametrize(("n", "k"), [(1, 4), (8, 2)])
def test_microbatches_make_the_gradient_of_one_batch(n, k):
    batch = regression_batch()
    expected = params_after(*sgd_step(1, 1), batch, steps=3)
    assert_close(params_after(*sgd_step(n, k), batch, steps=3), expected)


def ragged_batch(k, dtype=np.float32):
    """Give each of 2 replicas × k microbatches another number of real examples."""
    batch = jax.tree.map(lambda leaf: leaf.astype(dtype), regression_batch(32))
    blocks = 2 * k
    rows = np.arange(32 // blocks)
    real = [rows < 1 + (3 * block) % len(rows) for block in range(blocks)]
    real[1][:] = False  # a block of padding alone
    batch["mask"] = np.concatenate(real).astype(dtype)
    return batch


def one_big_mean(params, batch):
    real = batch["mask"] > 0
    return mlp_loss(params, {name: batch[name][real] for name in ("x", "y")})


@pytest.mark.parametrize("k", [1, 4])
def test_unequal_weights_make_one_big_mean(k):
    batch = ragged_batch(k)
    step, state = sgd_step(2, k, weighted_trainer)
    before = jax.device_get(state["params"])
    loss, grads = jax.value_and_grad(one_big_mean)(before, batch)
    state, metrics = step(state, batch)
    moved = jax.tree.map(lambda a, b: (a - b) / 0.1, before, state["params"])
    assert_close(moved, grads, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)


@pytest.mark.parametrize("k", [1, 2])
def test_unequal_weights_are_exact_in_float64(k):
    with jax.enable_x64(True):
        batch = ragged_batch(k, np.float64)
        batch["mask"] /= 3  # no weight is exact in float32
        step, state = sgd_step(2, k, weighted_trainer)
        before = jax.tree.map(
            lambda leaf: np.asarray(leaf, np.float64), state["params"]
        )
        state["params"] = before
        grads = jax.grad(one_big_mean)(before, batch)
        after, _ = step(state, batch)
        moved = jax.tree.map(lambda a, b: (a - b) / 0.1, before, after["params"])
        assert_close(moved, grads, rtol=1e-12)


def test_a_batch_of_padding_alone_moves_nothing():
    batch = {**regression_batch(), "mask": np.zeros(16, np.float32)}
    step, state = sgd_step(2, 2, weighted_trainer)
    before = jax.device_get(state["params"])
    assert_close(params_after(step, state, batch), before, rtol=0)


@pytest.mark.parametrize("k", [1, 2])
def test_padding_alone_may_have_a_gradient_of_nan(k):
    # A mean over no example is 0/0, and so is its gradient.
    def mean_loss(params, batch):
        weight = batch["mask"].sum()
        return (errors(params, batch) * batch["mask"]).sum() / weight, weight

    rep = replicas(2)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        (loss, weight), grads = jax.value_and_grad(mean_loss, has_aux=True)(
            state["params"], batch
        )
        after = apply(optimizer, state, grads, weight=weight)
        return after, {"loss": Mean(loss, weight)}

    batch = ragged_batch(k)
    step, state = rep.compile(step_fn, accumulate=k), rep.init(init_fn)
    loss = one_big_mean(jax.device_get(state["params"]), batch)
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"]))


def test_one_reduction_and_one_inner_update_per_update():
    rep = replicas(8)
    inner = optax.stateless(
        lambda updates, _: jax.tree.map(lambda g: -jnp.cbrt(g), updates)
    )
    init_fn, step_fn = trainer(rep.wrap_optimizer(inner))
    lowered = rep.compile(step_fn, accumulate=4).lower(
        rep.init(init_fn), regression_batch(32)
    )
    compiled = lowered.compile().as_text()
    defined = collections.Counter(re.findall(r"= .*? ([a-z-]+)\(", compiled))
    leaves = len(jax.tree.leaves(init_mlp(None)))
    assert defined["all-reduce"] + defined["all-reduce-start"] == 1
    assert defined["cbrt"] == leaves


@pytest.mark.parametrize("weighted", [False, True])
def test_no_collective_lies_inside_the_loop(weighted):
    rep = replicas(8)
    make, more = (weighted_trainer, 2) if weighted else (trainer, 0)
    init_fn, step_fn = make(rep.wrap_optimizer(optax.sgd(0.1)))
    batch = {**regression_batch(32), "mask": np.ones(32, np.float32)}
    step = rep.compile(step_fn, accumulate=4)
    jaxpr = jax.make_jaxpr(step._program)(
        FlatTree.of(rep.init(init_fn)),
        jax.tree.map(lambda x: x.reshape(4, 8, *x.shape[1:]), batch),
        None,
    ).jaxpr
    found = collectives(jaxpr)
    assert {name for name, _ in found} <= {"psum", "psum_invariant"}
    assert not any("scan" in inside for _, inside in found)
    # Three leaves and the loss; with weights one sum each for gradients and metrics.
    assert len(found) == 4 + more


def test_one_microbatch_needs_no_buffer():
    rep = replicas(8)
    tx = optax.sgd(0.1)
    init_fn, step_fn = trainer(
        rep.wrap_optimizer(tx), init_params=lambda key: init_mlp(key, width=1024)
    )
    state = rep.init(init_fn)
    wide = [leaf for leaf in jax.tree.leaves(state["opt"]) if leaf.ndim]
    assert wide == []
    assert state["opt"].pending is None

    @functools.partial(jax.jit, donate_argnums=0)
    def by_hand(params, batch):
        def replica(params, batch):
            loss, grads = jax.value_and_grad(mlp_loss)(params, batch)
            grads, loss = lax.pmean((grads, loss), "replica")
            updates, _ = tx.update(grads, tx.init(params), params)
            params = optax.apply_updates(params, updates)
            return params, loss, optax.tree.norm(grads)

        spec = jax.sharding.PartitionSpec
        return jax.shard_map(
            replica,
            mesh=rep.mesh,
            in_specs=(spec(), spec("replica")),
            out_specs=spec(),
            check_vma=False,
        )(params, batch)

    batch = regression_batch()
    hand = by_hand.lower(state["params"], batch).compile().memory_analysis()
    ours = rep.compile(step_fn).lower(state, batch).compile().memory_analysis()
    smallest_parameter = 4 * 1024
    assert ours.temp_size_in_bytes < hand.temp_size_in_bytes + smallest_parameter


@pytest.mark.parametrize("k", [1, 4])
def test_statistics_move_once_per_update(k):
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        state = {"params": init_mlp(key), "moves": jnp.zeros((), jnp.int32)}
        return state | {"opt": optimizer.init(state["params"])}

    def step_fn(state, batch):
        moves = state["moves"] + replicator.is_last_microbatch().astype(jnp.int32)
        grads = jax.grad(mlp_loss)(state["params"], batch)
        return apply(optimizer, {**state, "moves": moves}, grads), {}

    step, state = rep.compile(step_fn, accumulate=k), rep.init(init_fn)
    for _ in range(3):
        state, _ = step(state, regression_batch())
    assert int(state["moves"]) == 3


def test_other_state_sees_every_microbatch_in_turn():
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        w = jnp.ones(())
        return {"w": w, "opt": optimizer.init(w), "path": jnp.zeros(())}

    def step_fn(state, batch):
        mean = replicator.all_reduce(batch["x"].mean())
        updates, opt = optimizer.update(mean, state["opt"])
        path = 10 * state["path"] + mean
        return {"w": state["w"] + updates, "opt": opt, "path": path}, {}

    x = np.repeat(np.asarray([1, 2, 3, 4], np.float32), 2)
    state, _ = rep.compile(step_fn, accumulate=4)(rep.init(init_fn), {"x": x})
    assert float(state["path"]) == 1234


def test_parameters_do_not_move_between_microbatches():
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(optax.sgd(1.0))

    def init_fn(key):
        return {"w": jnp.ones(()), "opt": optimizer.init(jnp.ones(()))}

    def step_fn(state, batch):
        updates, opt = optimizer.update(batch["x"].mean(), state["opt"])
        return {"w": state["w"] + updates, "opt": opt}, {
            "before": Max(state["w"]),
            "after": state["w"] + updates,
        }

    x = np.arange(8, dtype=np.float32)
    _, metrics = rep.compile(step_fn, accumulate=4)(rep.init(init_fn), {"x": x})
    assert float(metrics["before"]) == 1
    assert float(metrics["after"]) == 1 - x.mean()


def test_all_microbatches_share_the_key_of_their_step():
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        return {"w": jnp.ones(()), "opt": optimizer.init(jnp.ones(()))}

    def step_fn(state, batch, key):
        updates, opt = optimizer.update(batch["x"].mean(), state["opt"])
        drawn = jax.random.uniform(key)
        return {"w": state["w"] + updates, "opt": opt}, {"drawn": Sum(drawn)}

    key = jax.random.key(5)
    step = rep.compile(step_fn, accumulate=4)
    _, metrics = step(rep.init(init_fn), {"x": np.ones(8, np.float32)}, key)
    drawn = jax.random.uniform(key)
    np.testing.assert_allclose(metrics["drawn"], 2 * 4 * drawn, rtol=1e-6)


def test_dropout_by_example_agrees_over_replicas_and_microbatches():
    def trained(n, k):
        return params_after(
            *sgd_step(n, k, dropout_trainer), regression_batch(), key=jax.random.key(1)
        )

    assert_close(trained(8, 2), trained(1, 1))
    assert_close(trained(2, 4), trained(1, 1))


def test_metrics_merge_over_microbatches_and_replicas():
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        return {"w": jnp.ones(()), "opt": optimizer.init(jnp.ones(()))}

    def step_fn(state, batch):
        x, weight = batch["x"], batch["weight"].sum()
        updates, opt = optimizer.update(x.mean(), state["opt"])
        mean = (x * batch["weight"]).sum() / jnp.maximum(weight, 1)
        return {"w": state["w"] + updates, "opt": opt}, {
            "plain": x.mean(),
            "mean": Mean(mean, weight),
            "sum": Sum(x.sum()),
            "max": Max(x.max()),
            "own": PerReplica(x.mean()),
        }

    x = np.asarray([5, 1, 2, 9, 3, 4, 7, 6], np.float32)
    weight = np.asarray([1, 0, 0, 0, 1, 1, 1, 1], np.float32)
    step = rep.compile(step_fn, accumulate=2)
    _, metrics = step(rep.init(init_fn), {"x": x, "weight": weight})
    assert float(metrics["plain"]) == x.mean()
    np.testing.assert_allclose(metrics["mean"], (x * weight).sum() / 5)
    assert float(metrics["sum"]) == x.sum()
    assert float(metrics["max"]) == 9
    np.testing.assert_allclose(metrics["own"], [(3 + 3.5) / 2, (5.5 + 6.5) / 2])


def test_metrics_of_the_update_are_those_of_its_end():
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(optax.sgd(0.5))

    def init_fn(key):
        return {"w": jnp.ones(()), "opt": optimizer.init(jnp.ones(()))}

    def step_fn(state, batch):
        updates, opt = optimizer.update(batch["x"].mean(), state["opt"])
        after = {"w": state["w"] + updates, "opt": opt}
        return after, {"update": updates, "norm": optax.tree.norm(updates)}

    x = np.arange(8, dtype=np.float32)
    _, metrics = rep.compile(step_fn, accumulate=4)(rep.init(init_fn), {"x": x})
    assert float(metrics["update"]) == -0.5 * x.mean()
    assert float(metrics["norm"]) == 0.5 * x.mean()


def test_a_gan_accumulates_when_both_gradients_come_first():
    def trained(n, k):
        rep = replicas(n)
        parts = [
            rep.wrap_optimizer(optax.sgd(0.1), name=name)
            for name in ("generator", "critic")
        ]
        init_fn, step_fn = gan_trainer(*parts)
        step, state = rep.compile(step_fn, accumulate=k), rep.init(init_fn)
        for _ in range(2):
            state, _ = step(state, regression_batch())
        return [state[part]["params"] for part in ("generator", "critic")]

    assert_close(trained(2, 4), trained(1, 1))


def test_chained_gan_updates_are_refused_by_name():
    rep = replicas(2)
    parts = [
        rep.wrap_optimizer(optax.sgd(0.1), name=name)
        for name in ("generator", "critic")
    ]
    init_fn, step_fn = gan_trainer(*parts, simultaneous=False)
    with pytest.raises(
        ArgumentError,
        match="got those for `generator` after the update of `critic`",
    ):
        rep.compile(step_fn, accumulate=2)(rep.init(init_fn), regression_batch())


def test_two_updates_by_one_optimizer_are_refused():
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))
    init_fn, step_fn = trainer(optimizer)

    def twice(state, batch):
        return step_fn(step_fn(state, batch)[0], batch)

    with pytest.raises(ArgumentError, match="once a step under accumulation, got 2"):
        rep.compile(twice, accumulate=2)(rep.init(init_fn), regression_batch())


def test_an_unwrapped_optimizer_cannot_accumulate():
    rep = replicas(2)
    init_fn, step_fn = trainer(optax.sgd(0.1))
    with pytest.raises(ArgumentError, match="whose state holds no wrapped optimizer"):
        rep.compile(step_fn, accumulate=2)(rep.init(init_fn), regression_batch())


def test_two_ways_to_accumulate_are_refused():
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1), accumulate=2))
    with pytest.raises(ArgumentError, match="whose optimizer accumulates by itself"):
        rep.compile(step_fn, accumulate=2)(rep.init(init_fn), regression_batch())


def lookahead():
    return lenient(optax.lookahead(optax.sgd(0.1), 2, slow_step_size=0.5))


def lookahead_trainer(optimizer):
    def init_fn(key):
        params = optax.LookaheadParams.init_synced(init_mlp(key))
        return {"params": params, "opt": optimizer.init(params)}

    def step_fn(state, batch):
        grads = jax.grad(mlp_loss)(state["params"].fast, batch)
        return apply(optimizer, state, grads), {}

    return init_fn, step_fn


@pytest.mark.parametrize(("n", "k"), [(1, 4), (2, 2)])
def test_parameters_may_be_more_than_what_gradients_are_of(n, k):
    def after(n, k):
        rep = replicas(n)
        init_fn, step_fn = lookahead_trainer(rep.wrap_optimizer(lookahead()))
        step = rep.compile(step_fn, accumulate=k)
        return params_after(step, rep.init(init_fn), regression_batch(), steps=3)

    assert_close(after(n, k), after(1, 1))


def test_gradients_of_fewer_parameters_are_refused_in_a_loop_that_accumulates():
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(lookahead(), accumulate=2)
    init_fn, step_fn = lookahead_trainer(optimizer)
    with pytest.raises(
        ArgumentError, match=r"`fast/.*` is missing. Pass `accumulate=k`"
    ):
        rep.compile(step_fn)(rep.init(init_fn), regression_batch())


def test_an_optimizer_that_rests_in_this_step_stays_as_it_is():
    rep = replicas(2)
    parts = [rep.wrap_optimizer(adam(), name=name) for name in ("generator", "critic")]
    init_fn, step_fn = gan_trainer(*parts)

    def critic_step(state, batch):
        after, metrics = step_fn(state, batch)
        return {**after, "generator": state["generator"]}, metrics

    state = rep.init(init_fn)
    before = jax.device_get(state)
    after, _ = rep.compile(critic_step, accumulate=2)(state, regression_batch())
    assert_close(after["generator"]["params"], before["generator"]["params"], rtol=0)
    assert int(after["generator"]["opt"].inner[0].count) == 0
    assert int(after["critic"]["opt"].inner[0].count) == 1


def test_bfloat16_gradients_add_up_in_float32():
    # In bfloat16 256 + 1 is 256: sixteen ones after it would be lost.
    rep = replicas(1)
    optimizer = rep.wrap_optimizer(optax.sgd(1.0))

    def init_fn(key):
        w = jnp.zeros((), jnp.bfloat16)
        return {"w": w, "opt": optimizer.init(w)}

    def step_fn(state, batch):
        grads = batch["x"].mean().astype(jnp.bfloat16)
        updates, opt = optimizer.update(grads, state["opt"])
        return {"w": state["w"] + updates, "opt": opt}, {}

    x = np.asarray([256, *[1] * 15], np.float32)
    state, _ = rep.compile(step_fn, accumulate=16)(rep.init(init_fn), {"x": x})
    expected = jnp.asarray(-x.mean(), jnp.bfloat16)
    assert float(state["w"]) == float(expected)


def test_outside_any_replica_a_lifted_step_is_one_replica():
    optimizer = replicator.wrap_optimizer(optax.sgd(0.1))
    init_fn, step_fn = trainer(optimizer)
    state, batch = init_fn(jax.random.key(0)), regression_batch()
    cut = jax.tree.map(lambda leaf: leaf.reshape(4, 4, *leaf.shape[1:]), batch)
    after, _ = jax.jit(lift(step_fn, accumulate=4))(state, cut, None)
    assert_close(after["params"], step_fn(state, batch)[0]["params"])
