"""Losses and gradients that would be another thing on more replicas are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from benchmarks.proof.losses import RIGHT_LOSSES, WRONG_LOSSES
from replicator import LocalSum, global_loss
from replicator.engine.analysis import replication_check as proof
from replicator.errors import ReplicationError
from tests.engine.analysis.test_replication_check import line_of, prove
from tests.steps import apply, init_mlp, mlp_loss, regression_batch, replicas


def judge(program, num_replicas=4):
    """Prove `program` of the suite, as one of `num_replicas`."""
    axes = [("replica", num_replicas)]
    given = jnp.ones((4, 3)), jnp.ones(3), jax.random.key(0)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        traced = jax.make_jaxpr(program, axis_env=axes)(*given)
    marks = [proof.BATCH, proof.STATE, proof.CLEAN]
    marks = [proof.CLEAN] * (len(traced.jaxpr.invars) - 3) + marks
    proof.prove_replicated(traced.jaxpr, marks, ["w"], num_replicas=num_replicas)


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_what_depends_on_the_number_of_replicas_is_refused(name):
    with pytest.raises(ReplicationError, match=r"^`(loss_fn|global_loss|grads)` must"):
        judge(WRONG_LOSSES[name])


@pytest.mark.parametrize("name", RIGHT_LOSSES)
def test_what_does_not_is_accepted(name):
    judge(RIGHT_LOSSES[name])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_summed_as_in_a_pmap_are_refused_with_their_line(accumulate):
    optimizer = replicas(8).wrap_optimizer(optax.sgd(0.1))

    def step_fn(state, batch):
        grads = jax.grad(mlp_loss)(state["params"], batch)
        grads = lax.psum(grads, "replica")
        return apply(optimizer, state, grads), {}

    params = init_mlp(None)
    state = {"params": params, "opt": optimizer.init(params)}
    with pytest.raises(ReplicationError) as found:
        prove(step_fn, state, regression_batch(), accumulate=accumulate)
    line = line_of(step_fn, "psum")
    assert f"got a sum: `psum` at {line}, with no division by the" in str(found.value)


def test_one_replica_sums_as_it_likes():
    optimizer = replicas(1).wrap_optimizer(optax.sgd(0.1))

    def step_fn(state, batch):
        grads = lax.psum(jax.grad(mlp_loss)(state["params"], batch), "replica")
        return apply(optimizer, state, grads), {}

    params = init_mlp(None)
    state = {"params": params, "opt": optimizer.init(params)}
    replicas(1).compile(step_fn).lower(state, regression_batch())


def test_a_count_of_tokens_may_be_that_of_all_examples():
    tokens = np.ones((16, 8, 2), np.float32)  # two examples on each of eight replicas

    def step_fn(state, batch):
        def loss_fn(w):
            return LocalSum((batch["x"] @ w).sum(), batch["x"].shape[0] * 8)

        grad = jax.grad(global_loss(lambda w, _: loss_fn(w)))(state["w"], None)
        return {"w": state["w"] - grad}, {}

    prove(step_fn, {"w": jnp.ones(2)}, {"x": tokens})
