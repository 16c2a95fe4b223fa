"""PPO, whose step updates many times in `lax.scan`, is that of plain jax."""

import jax
import pytest

import replicator
from tests.ppo import ENVS, batches, by_hand, plain, ppo
from tests.steps import assert_close, replicas


def in_run(rep, step_fn, given, **options):
    result = rep.run(step_fn, given, steps=len(given), display=False, **options)
    return result.state, result.metrics


def in_session(rep, step_fn, given, **options):
    with rep.session(
        step_fn, given, steps=len(given), display=False, **options
    ) as session:
        for batch in session.batches():
            metrics = session.step(batch)
    return session.result.state, metrics


@pytest.mark.slow
@pytest.mark.parametrize("train", [in_run, in_session])
@pytest.mark.parametrize("n", [1, 8])
def test_ppo_is_that_of_plain_jax(train, n):
    expected, reported = by_hand(ppo, batches(3))
    rep = replicas(n)
    init_fn, step_fn = ppo(
        rep.wrap_optimizer(plain()),
        replicator.all_reduce,
        envs=ENVS // n,
        own=replicator.PerReplica,
    )
    state, metrics = train(rep, step_fn, batches(3), init_fn=init_fn)
    assert_close(state["params"], expected["params"], rtol=1e-5)
    carts = state["carts"].value.reshape(ENVS, -1)
    assert_close(carts, expected["carts"], rtol=1e-5)
    assert_close(metrics["loss"], reported["loss"], rtol=1e-4)
    assert jax.numpy.isfinite(metrics["gradient_norm"])
