"""Advantages and the loss of PPO, against loops of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.ppo_loss import Steps, ppo_loss, steps_of
from tests.models.test_losses import made_up


def advantages(done, value, discount, trace):
    """Return those of each row, step by step from the end."""
    found = np.zeros(done.reward.shape)
    for row in range(len(found)):
        later = 0.0
        for t in reversed(range(found.shape[1])):
            if done.last[row, t]:
                later = 0.0
                continue
            after = discount * done.discount[row, t]
            error = done.reward[row, t] + after * value[row, t + 1] - value[row, t]
            later = error + trace * after * later
            found[row, t] = later
    return found


def test_targets_are_values_and_what_was_better_than_expected():
    _, value, done = made_up(t=12)
    steps = steps_of(value, done, discount=0.9, trace=0.8)
    expected = advantages(done, value, 0.9, 0.8)
    np.testing.assert_array_equal(steps.mask, ~done.last[:, :-1])
    np.testing.assert_allclose(
        steps.mask * (steps.target - value[:, :-1]), expected, atol=1e-5
    )


def test_advantages_have_mean_0_and_variance_1_over_transitions():
    _, value, done = made_up(t=12)
    steps = steps_of(value, done)
    taken = steps.advantage[steps.mask > 0]
    assert float(taken.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(taken.std()) == pytest.approx(1.0, abs=1e-4)
    assert not np.any(steps.advantage[steps.mask == 0])


@pytest.mark.parametrize(
    ("advantage", "moved", "goes_on"),
    [(1.0, 0.5, False), (1.0, -0.5, True), (-1.0, 0.5, True), (-1.0, -0.5, False)],
)
def test_a_probability_is_not_moved_further_than_the_clip(advantage, moved, goes_on):
    def loss(logit):
        logits = jnp.stack([logit, jnp.zeros(())])[None, None]
        steps = Steps(
            action=jnp.zeros((1, 1), jnp.int32),
            log_taken=jax.lax.stop_gradient(jax.nn.log_softmax(logits)[..., 0]) - moved,
            advantage=jnp.full((1, 1), advantage),
            target=jnp.zeros((1, 1)),
            mask=jnp.ones((1, 1)),
        )
        total, metrics = ppo_loss(logits, jnp.zeros((1, 1)), steps, entropy_cost=0.0)
        return total.value, metrics["clipped"].value

    gradient, clipped = jax.grad(loss, has_aux=True)(jnp.zeros(()))
    assert (float(gradient) != 0) == goes_on
    assert float(clipped) == (not goes_on)
