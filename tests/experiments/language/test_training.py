import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.language.training import LanguageSettings, held_out_loss, sample
from models.transformer import Transformer
from tests.steps import replicas


def test_a_sample_goes_on_after_what_came_before(key):
    def counts(windows):
        return 1000.0 * jax.nn.one_hot((windows + 1) % 256, 256)

    drawn = sample(jax.tree_util.Partial(counts), jnp.arange(4), key, length=6)
    np.testing.assert_array_equal(drawn, range(4, 10))


@pytest.mark.slow
@pytest.mark.parametrize("size", [9, 100, 601])
def test_a_model_that_knows_nothing_loses_the_same_on_every_token(size):
    model = Transformer(
        vocabulary=256, layers=1, width=4, heads=1, context=8, rngs=nnx.Rngs(0)
    )
    state = {"model": jax.tree.map(jnp.zeros_like, model)}
    text = np.arange(size, dtype=np.int64) % 256

    found = held_out_loss(replicas(2), state, text, LanguageSettings(context=8))
    assert found == pytest.approx(np.log(256), abs=1e-5)


@pytest.mark.slow
def test_cpus_stand_in_for_accelerators_only_where_there_are_none():
    code = """
import jax
from experiments.language.training import LanguageSettings, set_fake_devices
before = jax.config.jax_platforms
set_fake_devices(LanguageSettings(fake_devices=3))
assert jax.config.jax_platforms == before
assert jax.device_count() == 3
"""
    named = "REPLICATOR_FAKE_DEVICES"
    environment = {name: each for name, each in os.environ.items() if name != named}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
