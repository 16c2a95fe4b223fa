"""The first two updates of a partitioned program are those of one device."""

import time

import jax
import jax.experimental
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from replicator import Replicator, strategies
from replicator.engine.first_update.check import FirstUpdateCheck, FirstUpdates
from replicator.engine.partitioned import PartitionedLayout
from replicator.engine.sharded_step import CompileOptions
from replicator.engine.step.transforms import lift
from replicator.errors import PartitionError
from tests.cut_wrongly import BATCH, ROWS, centred, init_fn, minus_mean, step_from
from tests.steps import lenient


def cut(**options):
    strategy = strategies.fsdp(whole_below_bytes=0, **options)
    return Replicator(strategy=strategy, compilation_cache=False)


def checked(rep, step_fn, *, init=init_fn, updates=3, batch=BATCH, key=None, **options):
    step = rep.compile(step_fn, check_first_updates=True, **options)
    state = rep.init(init)
    for _ in range(updates):
        state, _ = step(state, batch, key)
    return [each.result for each in step.checked_updates]


def test_an_update_that_is_cut_wrongly_is_refused_by_leaf_and_strategy():
    with pytest.raises(PartitionError, match=r"`seen` off by .* under fsdp on 8 dev"):
        checked(cut(), step_from(centred))


def test_two_updates_are_checked_and_no_more():
    assert checked(cut(), step_from(minus_mean)) == ["same", "same"]


def test_nothing_is_checked_unless_it_is_asked_for():
    rep = cut()
    step, state = rep.compile(step_from(centred)), rep.init(init_fn)
    step(state, BATCH)
    assert list(step.checked_updates) == []


def test_replicas_are_not_checked():
    rep = Replicator(compilation_cache=False)
    step = rep.compile(lambda state, batch: (state, {}), check_first_updates=True)
    step(rep.init(init_fn), BATCH)
    assert list(step.checked_updates) == []


def test_half_precision_is_held_to_what_one_device_differs_from_itself():
    def step_fn(state, batch):
        half = batch["x"].astype(jnp.bfloat16)
        told = half.mT @ half  # over examples, which lie on many devices
        return {**state, "w": told.astype(jnp.float32)}, {}

    assert checked(cut(), step_fn) == ["rounding", "rounding"]


def test_what_one_device_cannot_run_is_told():
    rep = cut()
    rows = NamedSharding(rep.mesh, PartitionSpec("shard"))

    def place(x):
        return jax.lax.with_sharding_constraint(x, rows)

    assert checked(rep, step_from(place)) == ["not checked"]


def test_random_numbers_that_depend_on_devices_are_told():
    def step_fn(state, batch, key):
        drawn = jax.random.normal(key, batch["x"].shape)
        return {**state, "seen": batch["x"] + drawn}, {}

    key = jax.random.key(0, impl="rbg")
    assert checked(cut(), step_fn, key=key) == ["not checked"]


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"steps_per_call": 2}])
def test_updates_of_many_microbatches_and_of_one_call_are_checked(options):
    tx = Replicator(compilation_cache=False).wrap_optimizer(lenient(optax.adam(0.1)))

    def init(key):
        params = {"w": jnp.ones((8, 8))}
        seen = jnp.zeros((ROWS // options.get("accumulate", 1), 8))
        return {"params": params, "opt": tx.init(params), "seen": seen}

    def step_fn(state, batch):
        inner = step_from(minus_mean)
        loss, grads = jax.value_and_grad(
            lambda params: jnp.square(batch["x"] @ params["w"]).mean()
        )(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        seen = inner({"w": params["w"], "seen": None}, batch)[0]["seen"]
        return {"params": params, "opt": opt, "seen": seen}, {"loss": loss}

    batch = BATCH
    if "steps_per_call" in options:
        batch = {"x": jnp.stack([BATCH["x"], 2 * BATCH["x"]])}
    assert checked(cut(), step_fn, init=init, batch=batch, **options) == ["same"] * 2


def test_what_is_kept_with_padding_is_compared_without():
    def init(key):
        return {"w": jnp.ones((7, 5)), "seen": jnp.zeros((ROWS, 8))}

    def step_fn(state, batch):
        w = state["w"] + batch["x"].mean()
        return {"w": w, "seen": minus_mean(batch["x"])}, {}

    assert checked(cut(uneven="pad"), step_fn, init=init) == ["same", "same"]


def test_a_metric_that_is_nothing_but_rounding_ends_no_run():
    def step_fn(state, batch):
        white = (batch["x"] - batch["x"].mean()) / batch["x"].std()
        w = state["w"] - 0.1 * batch["x"].mean()
        return {**state, "w": w}, {"loss": -white.mean()}  # PPO's, at its first update

    assert "differs" not in checked(cut(), step_fn)


def test_what_a_norm_makes_of_a_constant_ends_no_run():
    def step_fn(state, batch):
        def loss_fn(w):
            y = batch["x"] @ w
            white = (y - y.mean(0, keepdims=True)) * jax.lax.rsqrt(y.var() + 1e-5)
            return (jax.nn.relu(white) @ jnp.arange(8.0)).mean()

        return {**state, "w": state["w"] - 0.1 * jax.grad(loss_fn)(state["w"])}, {}

    batch = {"x": BATCH["x"].copy()}
    batch["x"][:] = batch["x"][0]
    assert "differs" not in checked(cut(), step_fn, batch=batch)


def test_what_the_host_does_in_a_step_is_done_once():
    done = []

    def act(told):
        done.append(told)
        return told

    def step_fn(state, batch):
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        told = jax.experimental.io_callback(act, scalar, batch["x"].mean())
        return {**state, "w": state["w"] + told}, {}

    for options in ({}, {"steps_per_call": 2}):
        batch = {"x": jnp.stack([BATCH["x"]] * 2)} if options else BATCH
        done.clear()
        told = checked(cut(), step_fn, updates=1, batch=batch, **options)
        jax.effects_barrier()
        assert (told, len(done)) == (["not checked"], options.get("steps_per_call", 1))


def test_a_number_of_the_callers_own_may_take_a_place_in_the_state():
    def step_fn(state, batch):
        return {**state, "w": state["w"] + state["rate"] * batch["x"].mean()}, {}

    rep = cut()
    step = rep.compile(step_fn, check_first_updates=True)
    state = rep.init(lambda key: {"w": jnp.ones((8, 8)), "rate": jnp.float32(1.0)})
    for _ in range(2):
        state, _ = step({**state, "rate": 0.5}, BATCH)
    assert len(step.checked_updates) == 2


def test_devices_that_hold_no_second_state_check_nothing():
    def once(state, batch, key):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    layout = PartitionedLayout(strategies.fsdp(), jax.devices())
    update, options = lift(step_from(minus_mean)), CompileOptions(steps_per_call=2)
    check = FirstUpdates(
        update, layout, options, FirstUpdateCheck(), once=once, now_s=time.monotonic
    )
    state = cut().init(init_fn)
    batch = {"x": jnp.stack([BATCH["x"]] * 2)}
    assert check.hold("key", state, batch, None) is None
    assert [each.result for each in check.found] == ["not checked"]
