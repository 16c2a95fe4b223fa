"""Optimizers of the programs: what each does at one update depends on the others."""

import functools

import jax
import jax.numpy as jnp
import optax

schedule = optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 5)
sgd = functools.partial(optax.sgd, 0.1)
momentum = functools.partial(optax.sgd, 0.1, momentum=0.9, nesterov=True)
# An epsilon far above rounding: the sign of a gradient that is zero decides nothing.
adam = functools.partial(optax.adam, 0.05, eps=1e-4)
rmsprop = functools.partial(optax.rmsprop, 0.02, eps=1e-4)


def clipped_adam():
    return optax.chain(optax.clip_by_global_norm(0.3), adam())


def clipped_values():
    return optax.chain(optax.clip(0.05), momentum())


def adamw_schedule():
    return optax.adamw(schedule, eps=1e-4, weight_decay=0.1)


def scheduled_momentum():
    return optax.sgd(schedule, momentum=0.9)


def lamb():
    return optax.lamb(0.05, eps=1e-4)


def adafactor():
    return optax.adafactor(0.05, min_dim_size_to_factor=4, eps=1e-6)


def masked_decay_all():
    """Decay matrices alone."""
    return optax.chain(
        optax.add_decayed_weights(
            0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
        ),
        momentum(),
    )


def by_label():
    """Train matrices by Adam and the rest by clipped gradient descent, one frozen."""
    labels = {"w1": "matrix", "b1": "frozen", "w2": "vector"}
    return optax.multi_transform(
        {"matrix": adam(), "vector": clipped_values(), "frozen": optax.set_to_zero()},
        labels,
    )


def injected():
    return optax.inject_hyperparams(optax.adam)(learning_rate=schedule, eps=1e-4)


def noisy():
    return optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(5)), adam())


def schedule_free():
    return optax.contrib.schedule_free_sgd(0.1, warmup_steps=2)


def every_second():
    return optax.MultiSteps(momentum(), 2).gradient_transformation()


def centralized():
    return optax.chain(optax.centralize(), optax.scale_by_trust_ratio(), sgd())


def finite_only():
    return optax.apply_if_finite(adam(), 2)


def muon():
    return optax.contrib.muon(0.05)


def half(dtype: jnp.dtype):
    """Keep the first moment in `dtype`."""
    return optax.sgd(0.1, momentum=0.9, accumulator_dtype=dtype)
