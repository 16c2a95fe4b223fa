"""A number of Python in a first state is as strongly typed as what a step returns."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from replicator import RecompilationWarning, all_reduce, wrap_optimizer
from replicator.errors import StateError
from replicator.testing import assert_replica_invariant
from tests.steps import apply, assert_equal_bits, regression_batch, replicas

WEAK = {"zero": 0, "half": 0.5, "seven": jnp.array(0.7), "row": jnp.full(3, 2.0)}
REMEDY = (
    "`decay` is float32, as a number of Python is once it is state. Give it the dtype "
    "of its operands: `jnp.asarray(value, w.dtype)`."
)


def strong(tree):
    return not any(leaf.weak_type for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_born_or_put_is_strongly_typed(n):
    rep = replicas(n)
    assert strong(rep.init(lambda key: WEAK))
    assert strong(rep.put(WEAK))


def test_a_run_is_handed_a_strongly_typed_state():
    seen = []

    def step_fn(state, batch):
        seen.append(strong(state))
        return state, {}

    for first in ({"init_fn": lambda key: WEAK}, {"init_state": WEAK}):
        replicas(2).run(step_fn, [regression_batch()], steps=1, display=False, **first)
    step = replicas(2).compile(step_fn)
    step(WEAK, regression_batch())
    step.lower(WEAK, regression_batch())
    assert all(seen)


def counting(count):
    """Keep a mean over microbatches beside a model, as docs/guides/steps.md has it."""
    optimizer = wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        w = jnp.ones(4)
        more = {"count": count, "mean": 0.0}
        return {"params": w, "opt": optimizer.init(w)} | more

    def step_fn(state, batch):
        grads = jax.grad(lambda w: ((batch["x"] @ w) ** 2).mean())(state["params"])
        count = state["count"] + 1
        mean = all_reduce(batch["x"].mean())
        rate = 1 / jnp.asarray(count, jnp.float32)
        moved = state["mean"] + (mean - state["mean"]) * rate
        return apply(optimizer, state, grads) | {"count": count, "mean": moved}, {}

    return init_fn, step_fn


@pytest.mark.parametrize("count", [0, jnp.array(0.0)])
def test_a_count_weighs_a_mean_alike_however_it_was_born(count):
    init_fn, step_fn = counting(count)
    rep = replicas(2)
    state, step = rep.init(init_fn), rep.compile(step_fn, accumulate=4)
    for examples in (16, 8):  # the second is compiled anew
        batch = {"x": regression_batch()["x"][:examples]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecompilationWarning)
            state, _ = step(state, batch)
    assert state["count"] == 8
    x = regression_batch()["x"]
    np.testing.assert_allclose(state["mean"], (x.mean() + x[:8].mean()) / 2, rtol=1e-5)


def test_a_scale_beside_half_precision_gives_the_bits_of_a_run_that_goes_on(tmp_path):
    def step_fn(state, batch):
        with jax.numpy_dtype_promotion("standard"):
            scaled = jnp.asarray(batch["x"], jnp.bfloat16) * state["scale"]
            total = all_reduce(scaled.sum().astype(jnp.float32))
        return state | {"total": 0.9 * state["total"] + total}, {}

    def total(steps, **options):
        start = {"scale": jnp.array(0.7), "total": 0.0}
        found = replicas(2).run(
            step_fn,
            [regression_batch()] * 4,
            init_fn=lambda key: start,
            steps=steps,
            display=False,
            **options,
        )
        return found.state["total"]

    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    total(2, **saving)
    assert_equal_bits(total(4, **saving), total(4))


def decaying(dtype, promotion="standard", decay=0.99):
    def init_fn(key):
        return {"w": jnp.ones(4, dtype), "n": 3, "decay": decay}

    def step_fn(state, batch):
        with jax.numpy_dtype_promotion(promotion):
            return state | {"w": state["w"] * state["decay"]}, {}

    return init_fn, step_fn


def stepped(init_fn, step_fn):
    rep = replicas(2)
    return rep.compile(step_fn)(rep.init(init_fn), regression_batch())[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_leaf_that_would_become_wider_is_told_with_the_one_that_was_born_weak(dtype):
    with pytest.raises(StateError, match="`w` is float32") as found:
        stepped(*decaying(dtype))
    assert str(found.value).endswith(REMEDY)
    assert stepped(*decaying(dtype, decay=jnp.asarray(0.99, dtype)))["w"].dtype == dtype


def test_the_law_begins_as_a_run_does():
    init_fn, step_fn = decaying("bfloat16")
    with pytest.raises(StateError, match="as a number of Python is"):
        assert_replica_invariant(step_fn, init_fn, regression_batch(), at_steps=(0, 1))


def test_what_jax_says_of_strict_dtypes_names_the_leaf_that_was_born_weak():
    with pytest.raises(ValueError, match="promotion path") as found:
        stepped(*decaying("bfloat16", "strict"))
    assert REMEDY in found.value.__notes__


def test_a_module_that_a_step_writes_into_keeps_its_dtypes():
    def step_fn(model, batch):
        with jax.numpy_dtype_promotion("standard"):
            model.kernel.set_value(model.kernel * model.scale)
        return model, {}

    def init_fn(key):
        model = nnx.Linear(4, 1, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(key))
        model.scale = nnx.Variable(0.99)
        return model

    with pytest.raises(StateError, match="`scale/value` is float32, as a number"):
        stepped(init_fn, step_fn)
