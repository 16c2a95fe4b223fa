import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.char_lm import Config, bits_per_char, sample
from models.transformer import Transformer
from tests.experiments.command import command
from tests.steps import replicas

run = functools.partial(command, "char_lm", devices=2)
SMALL = ["--layers=1", "--width=16", "--heads=2", "--context=16", "--steps=4"]


def test_a_sample_goes_on_after_what_came_before(key):
    def counts(windows):
        return 1000.0 * jax.nn.one_hot((windows + 1) % 256, 256)

    drawn = sample(jax.tree_util.Partial(counts), jnp.arange(4), key, length=6)
    np.testing.assert_array_equal(drawn, range(4, 10))


@pytest.mark.slow
def test_a_model_that_knows_nothing_needs_eight_bits():
    model = Transformer(
        vocabulary=256, layers=1, width=4, heads=1, context=8, rngs=nnx.Rngs(0)
    )
    state = {"model": jax.tree.map(jnp.zeros_like, model)}
    text = np.arange(100, dtype=np.uint8)

    found = bits_per_char(replicas(2), state, text, Config(context=8))
    assert found == pytest.approx(8.0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp",
        pytest.param("data_parallel", marks=pytest.mark.nightly),
        pytest.param("tensor_parallel", marks=pytest.mark.nightly),
    ],
)
def test_the_last_line_says_what_was_found(strategy, tmp_path):
    done = run(f"--strategy={strategy}", f"--directory={tmp_path}", *SMALL)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["bits_per_char"] < 8.5
    assert 1 < found["gzip_bits_per_char"] < 4
    assert (found["strategy"], found["devices"], found["steps"]) == (strategy, 2, 4)
    assert "--- step 4" in done.stdout
    assert json.loads((tmp_path / "run.json").read_text())


@pytest.mark.slow
def test_a_run_that_is_saved_goes_on_under_another_strategy(tmp_path):
    kept = [f"--checkpoint_dir={tmp_path / 'kept'}", f"--directory={tmp_path}", *SMALL]
    assert run("--strategy=zero1", *kept).returncode == 0
    done = run("--strategy=fsdp", *kept, "--steps=6")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 6
    assert "--- step 4" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--strategy=rules"], "value should be one of <data_parallel|zero1"),
        (["--sources=nowhere"], "`sources` must be a directory with Python files"),
        (["--minutes=0"], "`--minutes` must be above 0"),
        (["--width=20"], "`width` must be a multiple of 8 for 4 heads"),
        (["--context=1"], "`length` must be at least 2"),
    ],
    ids=str,
)
def test_bad_input_says_what_is_wrong(flags, message):
    done = run(*flags)

    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.slow
def test_one_device_has_nothing_to_cut():
    done = run("--strategy=fsdp", devices=1)

    assert done.returncode != 0
    assert "`strategy` must be data_parallel on one device" in done.stderr
