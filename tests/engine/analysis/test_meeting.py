"""Collectives that meet single examples in a loss are warned of under accumulation."""

import jax
import jax.numpy as jnp
import optax
import pytest

import replicator
from benchmarks.proof.meeting import APART, MEET, NORMS, batch, weights
from replicator import MicrobatchCollectiveWarning, all_reduce, strategies
from replicator.engine.analysis import dataflow
from replicator.engine.analysis.meeting import EXAMPLES, PARAMS, MeetingRules
from tests.engine.analysis.test_replication_check import line_of
from tests.steps import replicas


def meetings(loss):
    """Return what meets examples on the way to the gradient of `loss`."""
    given = {name: jnp.asarray(leaf) for name, leaf in batch(8).items()}
    with jax.numpy_dtype_promotion("standard"):
        traced = jax.make_jaxpr(jax.grad(loss), axis_env=[("replica", 4)])(
            weights(), given
        )
    marks = [PARAMS, *(EXAMPLES for _ in given)]
    [found] = dataflow.flow(traced.jaxpr, marks, MeetingRules())
    return found.meets


@pytest.mark.parametrize("name", MEET)
def test_examples_that_meet_in_a_collective_are_seen(name):
    assert meetings(MEET[name])


@pytest.mark.parametrize("name", [*APART, *NORMS])
def test_what_only_adds_or_scales_is_no_meeting(name):
    assert not meetings((APART | NORMS)[name])


def centred(w, b):
    z = jnp.tanh(b["x"] @ w)
    return ((z - all_reduce(z.mean(0))[None]) ** 2).mean()


def step_of(loss, **options):
    rep = replicas(None, **options)
    optimizer = rep.wrap_optimizer(optax.sgd(1.0))

    def step_fn(state, batch):
        grads = jax.grad(loss)(state["w"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["w"])
        return {"w": state["w"] + updates, "opt": opt}, {}

    state = rep.put({"w": weights(), "opt": optimizer.init(weights())})
    return rep, step_fn, state


@pytest.mark.parametrize(
    ("options", "what"),
    [({}, "psum"), ({"strategy": strategies.fsdp()}, "all_reduce")],
)
def test_the_line_of_the_collective_is_named(options, what):
    rep, step_fn, state = step_of(centred, **options)
    with pytest.warns(MicrobatchCollectiveWarning) as found:
        rep.compile(step_fn, accumulate=2).lower(state, batch(32))
    [said] = [str(each.message) for each in found]
    line = line_of(centred, "all_reduce")
    assert said.startswith(f"`{what}` at {line} reduces a microbatch, not the batch")


def test_a_collective_of_jax_is_seen_under_a_strategy():
    rep, step_fn, state = step_of(MEET["mean discrepancy"], strategy=strategies.fsdp())
    with pytest.warns(
        MicrobatchCollectiveWarning, match="`psum` at .* in _mmd reduces"
    ):
        rep.compile(step_fn, accumulate=2).lower(state, batch(32))


@pytest.mark.parametrize("options", [{}, {"strategy": strategies.fsdp()}])
def test_one_microbatch_speaks_for_the_batch(options):
    rep, step_fn, state = step_of(centred, **options)
    rep.compile(step_fn).lower(state, batch(32))


def test_what_stands_for_a_collective_is_not_in_the_program():
    def text(fn):
        return jax.jit(fn).lower(jnp.ones(3)).as_text()

    def same(x):
        return x * 2

    def alone(x):
        return replicator.all_reduce(x, "sum") * 2

    assert text(alone).replace("jit_alone", "jit_same") == text(same)
