"""Sums that are reduced already, and weights that cannot be right, are refused."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import replicator
from replicator import LocalSum
from replicator.collectives.batch_norm import normalize
from replicator.collectives.moments import batch_moments, make_windows, pooled
from replicator.errors import ReplicationError
from tests.engine.analysis.test_replication_check import line_of, prove
from tests.steps import FEATURES, apply, regression_batch, replicas

# Examples meet in nearly all of these losses; with two microbatches that is said.
pytestmark = pytest.mark.filterwarnings(
    "ignore::replicator.MicrobatchCollectiveWarning"
)


def centred(x):
    """Subtract the mean over all examples, as cross-replica batch norm does."""
    return x - replicator.all_reduce(x.mean(0, keepdims=True))


def losses(w, batch, norm=centred):
    return (norm(batch["x"] * w[None]) ** 2).sum(1)


def weighted_step(loss_fn, weight_fn, *, reduce=lambda grads: grads):
    """Return optimizer state and a step that weighs gradients of a mean."""
    optimizer = replicas(8).wrap_optimizer(optax.sgd(0.1))

    def step_fn(state, batch):
        grads = reduce(jax.grad(loss_fn)(state["params"], batch))
        return apply(optimizer, state, grads, weight=weight_fn(batch)), {}

    params = jnp.ones((FEATURES,))
    return step_fn, {"params": params, "opt": optimizer.init(params)}


def own_weight(batch):
    return (batch["y"] > 0).sum().astype(jnp.float32)


def refusal(step_fn, state, **options):
    with pytest.raises(ReplicationError) as found:
        prove(step_fn, state, regression_batch(), **options)
    return str(found.value)


def mean_of(norm):
    return lambda w, batch: losses(w, batch, norm).mean()


def in_a_scan(x):
    return lax.scan(lambda c, _: (centred(c), None), x, None, length=2)[0]


@jax.custom_vjp
def by_rule(x):
    return centred(x)


by_rule.defvjp(lambda x: (centred(x), None), lambda _, g: (centred(g),))


def gathered(x):
    return x - lax.all_gather(x, "replica").mean((0, 1))[None]


def passed_on(x):
    return x - lax.ppermute(x, "replica", [(i, (i + 1) % 8) for i in range(8)])


def with_extremes(x):
    return x / replicator.all_reduce(jnp.abs(x).max(), "max")


CARRYING = {
    "plain": centred,
    "jit": jax.jit(centred),
    "remat": jax.checkpoint(centred),
    "scan": in_a_scan,
    "remat in scan": jax.checkpoint(in_a_scan),
    "custom_vjp": by_rule,
    "vmap": jax.vmap(lambda x: centred(x[:, None])[:, 0], 1, 1),
    "all_gather": gathered,
    "ppermute": passed_on,
    "max": with_extremes,
}


@pytest.mark.parametrize("name", CARRYING)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_own_weights_of_gradients_that_passed_between_replicas_are_refused(
    name, accumulate
):
    step_fn, state = weighted_step(mean_of(CARRYING[name]), own_weight)
    message = refusal(step_fn, state, accumulate=accumulate)
    assert message.startswith("`weight` must be equal on all replicas where gradients")


def test_the_message_names_the_reduction_and_its_line():
    def loss_fn(w, batch):
        scale = lax.pmean(batch["x"] @ w, "replica")
        return ((batch["x"] @ w) * scale).mean()

    step_fn, state = weighted_step(loss_fn, own_weight)
    assert refusal(step_fn, state) == (
        "`weight` must be equal on all replicas where gradients pass between them, got "
        f"one that may differ and gradients that `psum` at {line_of(loss_fn, 'pmean')} "
        "brings from other replicas. Take the gradient of a `LocalSum` by "
        "`replicator.value_and_grad`, and pass `update(..., count=n)`."
    )


def stopped(x):
    return x - lax.stop_gradient(centred(x))


def stopped_in_remat(x):
    return jax.checkpoint(stopped)(jnp.sin(x))


RIGHT = {
    "no reduction": (mean_of(lambda x: x), own_weight),
    "a reduction under stop_gradient": (mean_of(stopped), own_weight),
    "the same, recomputed": (mean_of(stopped_in_remat), own_weight),
    "equal weights": (mean_of(centred), lambda batch: jnp.float32(len(batch["y"]))),
    "reduced weights": (
        mean_of(centred),
        lambda batch: lax.psum(own_weight(batch), "replica"),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_that_are_right_are_accepted(name, accumulate):
    step_fn, state = weighted_step(*RIGHT[name])
    prove(step_fn, state, regression_batch(), accumulate=accumulate)


def test_a_gradient_that_was_reduced_since_is_accepted():
    mean = functools.partial(lax.pmean, axis_name="replica")
    step_fn, state = weighted_step(mean_of(centred), own_weight, reduce=mean)
    prove(step_fn, state, regression_batch())


def summed_step(loss_fn):
    """Return a step that trains on a `LocalSum`, and its state."""
    optimizer = replicas(8).wrap_optimizer(optax.sgd(0.1))

    def step_fn(state, batch):
        loss, grads = replicator.value_and_grad(loss_fn)(state["params"], batch)
        return apply(optimizer, state, grads, count=loss.weight), {"loss": loss}

    params = jnp.ones((FEATURES,))
    return step_fn, {"params": params, "opt": optimizer.init(params)}


def sum_of(value_fn):
    return lambda w, batch: LocalSum(value_fn(w, batch), len(batch["y"]))


REDUCED = {
    "mean": lambda w, batch: lax.pmean(losses(w, batch).mean(), "replica"),
    "all_reduce": lambda w, batch: replicator.all_reduce(losses(w, batch).sum(), "sum"),
    "gathered": lambda w, batch: lax.all_gather(losses(w, batch), "replica").sum(),
    "with weight decay": lambda w, batch: (
        lax.psum(losses(w, batch).sum(), "replica") + (w**2).sum()
    ),
    "in a call": lambda w, batch: jax.jit(
        lambda x: lax.psum((x * w[None]).sum(), "replica")
    )(batch["x"]),
    "recomputed": lambda w, batch: jax.checkpoint(
        lambda w: lax.psum((batch["x"] * w[None]).sum(), "replica")
    )(w),
}


@pytest.mark.parametrize("name", REDUCED)
def test_a_loss_that_is_reduced_already_is_refused(name):
    message = refusal(*summed_step(sum_of(REDUCED[name])))
    assert message.startswith("`loss_fn` must return the sum over this replica's own")


def test_the_message_names_where_the_loss_was_reduced():
    def loss_fn(w, batch):
        return LocalSum(lax.psum((batch["x"] @ w).sum(), "replica"), 2)

    assert refusal(*summed_step(loss_fn)) == (
        "`loss_fn` must return the sum over this replica's own examples, got one that "
        f"`psum` at {line_of(loss_fn, 'psum')} reduced over replicas already. Return "
        "the local sum: the optimizer reduces."
    )


LOCAL = {
    "with batch norm": lambda w, batch: losses(w, batch).sum(),
    "of the parameters alone": lambda w, batch: (w**2).sum(),
    "with a reduced factor": lambda w, batch: (
        losses(w, batch).sum() * lax.pmean(batch["x"].mean(), "replica")
    ),
}


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_a_local_sum_is_accepted(name, options):
    prove(*summed_step(sum_of(LOCAL[name])), regression_batch(), **options)


def test_a_sum_of_the_parameters_alone_is_accepted_in_many_steps_a_call():
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), regression_batch())
    step_fn, state = summed_step(sum_of(LOCAL["of the parameters alone"]))
    prove(step_fn, state, batch, steps_per_call=2)


@pytest.mark.parametrize("n", [1, 2])
def test_a_weight_beside_a_norm_of_each_replica_alone_is_accepted(n):
    optimizer = replicas(n).wrap_optimizer(optax.sgd(0.1))

    def loss_fn(w, x):
        windows = make_windows(len(x), stats="replica")
        moments = batch_moments(x * w[None], windows)
        return normalize(x * w[None], moments).sum(), pooled(moments, windows).mean[0]

    def step_fn(state, batch):
        grads, mean = jax.grad(loss_fn, has_aux=True)(state["params"], batch["x"])
        after = apply(optimizer, state, grads, weight=own_weight(batch))
        return after | {"mean": mean}, {}

    params = jnp.ones((FEATURES,))
    state = {"params": params, "opt": optimizer.init(params), "mean": 0 * params}
    step = replicas(n).compile(step_fn)
    step.lower(jax.tree.map(jnp.asarray, state), regression_batch())
