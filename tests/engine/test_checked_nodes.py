"""A pytree node that checks itself when it is built is a state like others.

As the loss scale of `jmp` does: it takes arrays, what stands for them in a trace, and
the `object()` that JAX puts in their place; nothing else has a dtype.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator import strategies
from replicator.testing import assert_replica_invariant
from tests.steps import apply, assert_equal_bits, mlp_loss, regression_batch, replicas
from tests.steps import init_mlp as init_params


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Checked:
    """A scale, and how many updates it has seen."""

    scale: Any
    count: Any

    def __post_init__(self):
        if type(self.scale) is not object:
            assert jnp.issubdtype(
                jax.eval_shape(lambda: self.scale).dtype, jnp.floating
            )
            assert jnp.issubdtype(jax.eval_shape(lambda: self.count).dtype, jnp.integer)

    def tree_flatten(self):
        return (self.scale, self.count), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


BOTH = pytest.mark.parametrize(
    "strategy", [None, strategies.fsdp()], ids=["replicas", "fsdp"]
)


def checked_trainer(rep):
    tx = rep.wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        params = init_params(key)
        checked = Checked(jnp.ones(()), jnp.zeros((), jnp.int32))
        return {"params": params, "opt": tx.init(params), "checked": checked}

    def step_fn(state, batch):
        old = state["checked"]
        loss, grads = jax.value_and_grad(mlp_loss)(state["params"], batch)
        after = apply(tx, state, jax.tree.map(lambda g: g * old.scale, grads))
        after["checked"] = Checked(old.scale * 0.5, old.count + 1)
        return after, {"loss": loss}

    return init_fn, step_fn


@BOTH
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"steps_per_call": 2}])
def test_a_state_that_checks_itself_is_born_put_and_updated(strategy, options):
    rep = replicas(2, strategy=strategy)
    init_fn, step_fn = checked_trainer(rep)
    state, batch = rep.init(init_fn), regression_batch()
    assert_equal_bits(rep.put(jax.device_get(state)), state)
    calls = options.get("steps_per_call", 1)
    if calls > 1:
        batch = jax.tree.map(lambda leaf: np.stack([leaf] * calls), batch)
    after, _ = rep.compile(step_fn, **options)(state, batch)
    assert after["checked"].scale == 0.5**calls
    assert after["checked"].count == calls


@BOTH
def test_a_run_of_a_state_that_checks_itself_goes_on(tmp_path, strategy):
    rep = replicas(2, strategy=strategy)
    init_fn, step_fn = checked_trainer(rep)
    dataset = [regression_batch(seed=seed) for seed in range(3)]

    def run(steps, **options):
        options = {"init_fn": init_fn, "accumulate": 2, "display": False} | options
        return rep.run(step_fn, dataset, steps=steps, **options).state

    run(2, checkpoint_dir=tmp_path)
    found = run(3, checkpoint_dir=tmp_path, on_nonfinite="skip")
    assert_equal_bits(found, run(3))


@BOTH
def test_a_state_that_checks_itself_is_evaluated_and_inspected(strategy):
    rep = replicas(2, strategy=strategy)
    init_fn, step_fn = checked_trainer(rep)
    batch = regression_batch()

    def eval_fn(state, batch):
        return {"scaled": batch["y"] * state["checked"].scale}

    found = rep.evaluate(eval_fn, [batch], state=rep.init(init_fn))
    assert found["scaled"] == pytest.approx(batch["y"].mean())
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    assert rep.inspect(step_fn, shapes, batch).flops > 0


@pytest.mark.slow
@BOTH
def test_the_law_of_a_state_that_checks_itself_is_checked(strategy):
    init_fn, step_fn = checked_trainer(replicas(1))
    assert_replica_invariant(
        step_fn,
        init_fn,
        regression_batch(),
        replicas=(1, 2),
        accumulate=(1, 2),
        at_steps=(0, 1),
        strategy=strategy,
    )
