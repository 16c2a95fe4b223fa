import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.impala_atari import (
    Config,
    cut,
    play,
    random_player,
    train_process,
)

ROOT = Path(__file__).parents[2]
# Of eight replicas, a trajectory each.
SMALL = Config(environments=16, batch_size=8, unroll_length=3, steps=4)


@pytest.fixture(autouse=True)
def _promotion():
    # Of optax's RMSProp.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.mark.slow
def test_training_goes_on_from_its_checkpoint(tmp_path):
    first = train_process(dataclasses.replace(SMALL, directory=str(tmp_path)))
    assert first.updates == 4
    more = dataclasses.replace(SMALL, directory=str(tmp_path), steps=6)
    second = train_process(more)
    assert second.updates == 6
    kernels = [each.params["policy"]["kernel"] for each in (first, second)]
    assert not np.array_equal(*kernels)
    assert np.abs(kernels[1] - kernels[0]).max() < 0.05  # not a new beginning


def test_an_unroll_is_cut_into_batches_in_order():
    rows = {"action": np.arange(12).reshape(6, 2), "extras": {"a": np.arange(6)}}
    batches = cut(rows, 2)
    assert [each["action"][:, 0].tolist() for each in batches] == [
        [0, 2],
        [4, 6],
        [8, 10],
    ]
    assert [each["extras"]["a"].tolist() for each in batches] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]


@pytest.mark.slow
def test_chance_loses_at_pong():
    gained = play(SMALL, random_player(SMALL, size=4), 4, seed=0)
    assert all(-21 <= each <= -17 for each in gained)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [[], ["--scale=program", "--launch_type=threads"]], ids=["one", "program"]
)
def test_a_minute_of_training_ends_with_numbers_and_pictures(flags, tmp_path):
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "experiments.impala_atari",
                f"--directory={tmp_path}",
            ),
            *("--game=breakout", "--minutes=0.5", "--episodes=3", *flags),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["p_value"] <= 1
    assert found["steps_per_s"] > 0
    names = {path.name for path in tmp_path.iterdir()}
    assert {
        "learning_curve.png",
        "episode.png",
        "metrics.jsonl",
        "returns.jsonl",
    } <= names
