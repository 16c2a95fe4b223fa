"""Checkpoints in folders of any name: what was saved is read again."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import replicator
from replicator.checkpoint import CheckpointStore
from tests.checkpoint.states import bits, small_snapshot, small_state
from tests.steps import regression_batch

ROOT = Path(__file__).parents[2]

# Sweeps name folders by what they try. The first are what TensorStore reads as a slash,
# what is no text, and what were lost once: patterns of a file name.
MISREAD = ["a\\b", os.fsdecode(b"\xff"), "lr=0.1,layers=[2,3]", "[!a]", "a\\[b"]
NAMES = [
    *MISREAD,
    *("star*", "what?", "{a,b}", "a b", " lead", "trail ", "50%", "%41", "~", "~root"),
    *("ünïcödé", "日本", "new\nline", "tab\t", "\x7f", "a#b", "a|b", "a&b=c", "quote'"),
    *('quote"', "$HOME", "a;b", "!x", "[", "]", "a:b", "-dash", "file:x", "..a", "<x>"),
    *("a`b`", "ocdbt.process_0", "x" * 200),
]


def saved_in(directory):
    with CheckpointStore(directory) as store:
        store.save(small_snapshot(1))
    return directory


@pytest.mark.parametrize("name", MISREAD[:2], ids=ascii)
def test_what_was_saved_in_a_folder_that_is_easily_misread_is_read(name, tmp_path):
    folder = saved_in(tmp_path / name)
    assert bits(CheckpointStore(folder).restore().arrays) == bits(small_state(1))
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_what_was_saved_in_a_folder_of_an_odd_name_is_read(name, tmp_path):
    folder = saved_in(tmp_path / name)
    assert bits(CheckpointStore(folder).restore().arrays) == bits(small_state(1))
    assert [path.name for path in tmp_path.iterdir()] == [name]


IN_A_C_LOCALE = """
import sys
from replicator.checkpoint import CheckpointStore
from tests.checkpoint.states import small_snapshot
assert sys.getfilesystemencoding() == "ascii"
with CheckpointStore(sys.argv[1]) as store:
    store.save(small_snapshot(1))
"""


@pytest.mark.slow
def test_a_path_that_is_not_ascii_saves_in_a_c_locale(tmp_path):
    environ = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", IN_A_C_LOCALE, str(tmp_path / "größe")]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **environ})
    folder = tmp_path / "größe"
    assert bits(CheckpointStore(folder).restore().arrays) == bits(small_state(1))


@pytest.mark.slow
@pytest.mark.parametrize("name", MISREAD, ids=ascii)
def test_a_run_goes_on_in_a_folder_of_an_odd_name(name, tmp_path):
    def init_fn(key):
        return {"w": jnp.float32(0)}

    def step_fn(state, batch):
        return state, {"loss": state["w"] + batch["x"].mean()}

    for steps in (2, 3):
        result = replicator.Replicator().run(
            step_fn,
            [regression_batch(seed=seed) for seed in range(3)],
            init_fn=init_fn,
            steps=steps,
            directory=tmp_path / name,
            checkpoint_dir=tmp_path / name / "checkpoints",
        )
    assert result.step == 3
