"""A rehearsal finds a step that is cut wrongly, and passes one that is right."""

import functools
import os

import jax
import jax.numpy as jnp
import optax
import pytest

from replicator import Replicator, strategies
from replicator.tuning.problem import random_batch
from replicator.tuning.rehearsal_process import rehearsed
from replicator.tuning.rehearse import RehearsalOrder, rehearse
from tests import cut_wrongly

BATCH = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def problem(rep, small=False):
    """Return two layers whose larger one every strategy cuts at true sizes."""
    optimizer = rep.wrap_optimizer(optax.sgd(1e-2, 0.9))
    width = 16 if small else 4096

    def init_fn(key):
        params = {"up": jnp.full((8, width), 0.1), "down": jnp.ones((width, 1)) / width}
        return {"params": params, "opt": optimizer.init(params)}

    def step_fn(state, batch):
        def loss_fn(params):
            return jnp.square(jnp.tanh(batch["x"] @ params["up"]) @ params["down"])

        loss, grads = jax.value_and_grad(lambda params: loss_fn(params).mean())(
            state["params"]
        )
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    return step_fn, init_fn, {"x": BATCH}


def wrong(rep, small=False):
    step_fn = cut_wrongly.step_from(cut_wrongly.centred)
    return step_fn, cut_wrongly.init_fn, {"x": BATCH}


def unsized(rep):
    return problem(rep)


def dying(rep, small=False):
    os.abort()


def order(function, strategy, devices=8):
    return RehearsalOrder(
        problem=function,
        make_replicator=functools.partial(Replicator, compilation_cache=False),
        strategy=strategy,
        devices=devices,
    )


@pytest.mark.parametrize(
    "strategy",
    [strategies.fsdp(), strategies.hybrid(shard=2), strategies.data_parallel()],
    ids=lambda strategy: strategy.name,
)
def test_a_right_step_is_ok(strategy):
    found = rehearsed(order(problem, strategy))

    assert found.status == "ok", found.reason
    assert found.reason.startswith("update 1: at most `")
    assert found.cut == (0 if strategy.name == "data_parallel" else 2)
    assert found.left_whole == ()


def test_a_step_that_is_cut_wrongly_differs_by_name():
    found = rehearsed(order(wrong, strategies.fsdp(whole_below_bytes=0)))

    assert found.status == "differs"
    assert found.reason.startswith("`seen` off by ")


def test_a_problem_without_small_sizes_is_none_to_rehearse():
    found = rehearsed(order(unsized, strategies.fsdp()))

    assert found.status == "problem"
    assert "`problem` must take `small` to be rehearsed" in found.reason


def test_what_does_not_divide_is_refused_by_name():
    strategy = strategies.tensor_parallel({"params/down": (None, "model")})
    found = rehearsed(order(problem, strategy))

    assert found.status == "refused"
    assert "`params/down` must divide over {'model': 8}" in found.reason


def test_a_random_batch_has_numbers_that_a_step_can_use():
    shapes = {
        "image": jax.ShapeDtypeStruct((64, 4), jnp.uint8),
        "label": jax.ShapeDtypeStruct((64,), jnp.int32),
        "mask": jax.ShapeDtypeStruct((64,), jnp.bool_),
        "weight": jax.ShapeDtypeStruct((64,), jnp.bfloat16),
    }
    batch = random_batch(shapes, seed=1)

    assert {name: leaf.dtype for name, leaf in batch.items()} == {
        name: leaf.dtype for name, leaf in shapes.items()
    }
    assert batch["image"].max() > 8 > batch["label"].max()
    assert 0 <= batch["weight"].min() <= batch["weight"].max() <= 1


@pytest.mark.slow
def test_a_process_of_its_own_rehearses_more_devices_than_there_are():
    found = rehearse(order(problem, strategies.fsdp(), devices=16))

    assert (found.status, found.mesh["shard"]) == ("ok", 16)


@pytest.mark.slow
def test_a_process_that_dies_says_how():
    found = rehearse(order(dying, strategies.fsdp(), devices=1024))

    assert found.status == "died"
    assert found.reason.startswith("it was killed by SIGABRT")
    assert (found.planned["shard"], found.mesh["shard"]) == (1024, 256)
