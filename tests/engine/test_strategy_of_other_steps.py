"""Steps of other kinds have the same answer under strategies as on one device."""

import jax
import numpy as np
import optax
import pytest

from replicator import Replicator, strategies
from tests.steps import (
    adam,
    assert_close,
    dropout_trainer,
    gan_trainer,
    init_mlp,
    lenient,
    regression_batch,
    replicas,
    trainer,
    weighted_trainer,
)

CUT = {"whole_below_bytes": 0}
PARTITIONING = {
    "zero1": strategies.zero1(**CUT),
    "fsdp": strategies.fsdp(**CUT),
    "mixed": strategies.Rules(
        [strategies.Rule(pattern="*", stored="model", computed="model")],
        replica=2,
        shard=2,
        model=2,
        **CUT,
    ),
}
OPTIMIZERS = {
    "lamb": optax.lamb(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon(0.1),
    "masked": optax.masked(optax.adam(0.1), {"w1": True, "b1": False, "w2": True}),
}
batch = {**regression_batch(32), "mask": np.arange(32, dtype=np.float32) % 3}


def wide(key):
    return init_mlp(key, width=16)


def after(rep, init_fn, step_fn, *, accumulate=1, key=None):
    """Return the state after two updates, on the host."""
    step, state = rep.compile(step_fn, accumulate=accumulate), rep.init(init_fn)
    for _ in range(2):
        state, _ = step(state, batch) if key is None else step(state, batch, key)
    return jax.device_get(state)


def over(strategy):
    return Replicator(strategy=strategy, compilation_cache=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTITIONING)
@pytest.mark.parametrize("which", OPTIMIZERS)
def test_an_optimizer_that_is_not_elementwise_is_right(which, name):
    tx = lenient(OPTIMIZERS[which])
    alone, one = trainer(tx, init_params=wide), replicas(1)
    wrapped = trainer(one.wrap_optimizer(tx), init_params=wide)
    found, expected = after(over(PARTITIONING[name]), *alone), after(one, *wrapped)

    assert_close(found["params"], expected["params"], rtol=1e-6)


def gan(rep):
    optimizers = [
        rep.wrap_optimizer(adam(), name=name) for name in ("generator", "critic")
    ]
    return gan_trainer(*optimizers)


STEPS = {
    "gan": gan,
    "dropout": lambda rep: dropout_trainer(rep.wrap_optimizer(adam())),
    "weighted": lambda rep: weighted_trainer(rep.wrap_optimizer(adam())),
}


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", PARTITIONING)
@pytest.mark.parametrize("which", STEPS)
def test_a_wrapped_step_is_that_of_one_replica(which, name, accumulate):
    options = {"accumulate": accumulate}
    options |= {"key": jax.random.key(1)} if which == "dropout" else {}
    one, rep = replicas(1), over(PARTITIONING[name])

    found = after(rep, *STEPS[which](rep), **options)
    assert_close(found, after(one, *STEPS[which](one), **options), rtol=1e-5)
