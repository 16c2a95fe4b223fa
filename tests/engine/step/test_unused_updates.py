"""A step that makes an update, and returns the state without it, is refused."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from replicator.errors import StateError
from replicator.nnx import params_of
from tests.steps import adam, mlp_loss, regression_batch, replicas, trainer


@pytest.fixture
def rep():
    return replicas(2)


def parts(optimizer, state, batch):
    grads = jax.grad(mlp_loss)(state["params"], batch)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    return updates, optax.apply_updates(state["params"], updates), opt


UNUSED = {
    "`params/b1` with its update, got it as it came": (
        lambda state, updates, params, opt: {"params": state["params"], "opt": opt}
    ),
    "`params/b1` with its update, got its update alone": (
        lambda state, updates, params, opt: {"params": updates, "opt": opt}
    ),
    "new state of its optimizer, got `opt` as it came": (
        lambda state, updates, params, opt: {"params": params, "opt": state["opt"]}
    ),
    "`params/b1` with its update, got it as": lambda state, *_: state,
}


@pytest.mark.parametrize("text", UNUSED)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_that_is_not_returned_is_refused(rep, text, accumulate):
    optimizer = rep.wrap_optimizer(adam())
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        return UNUSED[text](state, *parts(optimizer, state, batch)), {}

    step = rep.compile(step_fn, accumulate=accumulate)
    with pytest.raises(StateError, match=text):
        step(rep.init(init_fn), regression_batch())


def test_an_optimizer_state_from_outside_is_refused(rep):
    optimizer = rep.wrap_optimizer(adam())
    init_fn, _ = trainer(optimizer)
    outside = init_fn(jax.random.key(0))["opt"]

    def step_fn(state, batch):
        _, params, _ = parts(optimizer, state | {"opt": outside}, batch)
        return state | {"params": params}, {}

    with pytest.raises(StateError, match="from its `state`"):
        rep.compile(step_fn)(rep.init(init_fn), regression_batch())


def test_an_optimizer_of_the_steps_own_is_taken(rep):
    optimizer = rep.wrap_optimizer(adam())

    def step_fn(state, batch):
        opt = optimizer.init(state["params"])
        _, params, _ = parts(optimizer, {"params": state["params"], "opt": opt}, batch)
        return {"params": params}, {}

    init_fn, _ = trainer(optimizer)
    state = {"params": init_fn(jax.random.key(0))["params"]}
    rep.compile(step_fn)(rep.put(state), regression_batch())


def test_a_kept_copy_of_the_optimizer_before_is_taken(rep):
    optimizer = rep.wrap_optimizer(adam())
    init_fn, step_fn = trainer(optimizer)

    def keeps(state, batch):
        after, metrics = step_fn(state["now"], batch)
        return {"now": after, "before": state["now"]["params"]}, metrics

    state = rep.init(
        lambda key: {"now": init_fn(key), "before": init_fn(key)["params"]}
    )
    rep.compile(keeps)(state, regression_batch())


def test_a_module_that_is_written_to_from_outside_comes_with_lines_that_work(rep):
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))

    def step_fn(state, batch):
        model.kernel.set_value(model.kernel[...] + 1)
        return state, {}

    with pytest.raises(StateError, match="must return a changed module") as caught:
        rep.compile(step_fn)({"a": jnp.ones(3)}, regression_batch())
    assert str(caught.value).count("\n") == 4
    assert "different trace level" in str(caught.value)


@pytest.mark.parametrize(
    "other", [{"w": jnp.ones(2)}, nnx.Linear, jnp.ones(2), None, [1.0]]
)
def test_only_modules_have_parameters(other):
    with pytest.raises(ValueError, match="`model` must be a module of flax NNX"):
        params_of(other)
