"""A run that died is looked at again: state rebuilt, step replayed, the line found."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from replicator.base.per_replica import take_own
from replicator.cli.main import main
from replicator.engine.compiled_step import CompiledStep, CompileOptions
from replicator.engine.step.state import first_run
from replicator.engine.step.transforms import count_steps, lift
from replicator.errors import ArgumentError, NonFiniteError
from replicator.inputs.feed import open_input
from replicator.inputs.options import InputOptions
from replicator.training.postmortem.bundle import (
    Bundle,
    arrays_of,
    read_bundle,
    write_bundle,
)
from replicator.training.postmortem.examine import rebuild, write_post_mortem
from replicator.training.postmortem.recorded_program import (
    joined_batch,
    one_replica_update,
)
from replicator.training.postmortem.replay import (
    load_function,
    replay_recorded,
    replay_step,
)
from tests.steps import regression_batch, replicas
from tests.training.postmortem.crashing import init_fn, step_fn

BAD_STEP = 4
FAILURE = NonFiniteError("`loss` must be finite, got nan.", step=BAD_STEP, leaf="loss")


def tame(seed):
    batch = regression_batch(seed=seed)
    return batch | {"x": np.abs(batch["x"])}


def dataset():
    batches = [tame(seed) for seed in range(6)]
    batches[BAD_STEP - 1]["x"][5, 2] = -3.0
    return batches


def compiled(layout, **options):
    update = count_steps(lift(step_fn, **options))
    return CompiledStep(update, layout, CompileOptions(**options))


def died(directory, *, accumulate=1, update=None):
    """Die at step 4, rebuild what was before it, and write a bundle."""
    layout = replicas(4).layout
    options = InputOptions(accumulate=accumulate, epochs=1)
    with open_input(dataset(), layout, options=options) as batches:
        state, placed = rebuild(
            compiled(layout, accumulate=accumulate),
            first_run(init_fn, layout, seed=0).born(),
            batches,
            start_step=0,
            bad_step=BAD_STEP,
        )
    return write_post_mortem(
        directory,
        FAILURE,
        step=BAD_STEP,
        update=update or one_replica_update(step_fn),
        state=take_own(state),
        batch=joined_batch(placed.value, accumulate=accumulate, steps_per_call=1),
        about={"config": {"seed": 0}},
    )


@pytest.fixture(scope="module")
def bundle_path(tmp_path_factory):
    return died(tmp_path_factory.mktemp("run"))


def test_the_state_before_the_bad_step_is_rebuilt_to_the_bit(bundle_path):
    layout = replicas(4).layout
    step, state = compiled(layout), first_run(init_fn, layout, seed=0).born()
    with open_input(dataset(), layout) as batches:
        for _ in range(BAD_STEP - 1):
            state, _ = step(state, next(batches))
    found, expected = read_bundle(bundle_path).state, arrays_of(state)
    assert list(found) == list(expected)
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array)


def test_the_batch_is_whole(bundle_path):
    found = read_bundle(bundle_path).batch
    np.testing.assert_array_equal(found["x"], dataset()[BAD_STEP - 1]["x"])


def test_microbatches_are_joined(tmp_path):
    found = read_bundle(died(tmp_path, accumulate=2)).batch
    np.testing.assert_array_equal(found["x"], dataset()[BAD_STEP - 1]["x"])


def assert_found(verdict):
    assert verdict.inputs == []
    assert verdict.nan.place.primitive == "sqrt"
    assert "crashing.py" in verdict.nan.place.line
    assert verdict.nan.place.line.endswith("in root_loss")
    assert any(name.startswith("metrics/loss") for name in verdict.outputs)


def test_the_recorded_program_finds_the_line(bundle_path):
    assert_found(replay_recorded(read_bundle(bundle_path)))


def test_the_users_step_finds_the_line(bundle_path):
    assert_found(replay_step(read_bundle(bundle_path), step_fn, init_fn))


def test_a_step_that_was_mended_is_not_bad_any_more(bundle_path):
    def mended(state, batch):
        return step_fn(state, batch | {"x": jax.numpy.abs(batch["x"])})

    verdict = replay_step(read_bundle(bundle_path), mended, init_fn)
    assert verdict.outputs == []
    assert "not reproduced" in verdict.describe()


def test_the_jaxpr_names_lines(bundle_path):
    assert "crashing.py" in read_bundle(bundle_path).jaxpr


@pytest.mark.slow
def test_the_command_needs_no_code_of_the_user(bundle_path, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "replicator.cli", "replay", str(bundle_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "step 4: NonFiniteError: `loss` must be finite, got nan."
    assert lines[1].startswith("first NaN: `sqrt` at ")
    assert "not finite after the step: metrics/loss (1 of 1)" in lines


def test_the_command_takes_a_step_by_name(bundle_path, capsys):
    module = "tests.training.postmortem.crashing"
    words = ["replay", str(bundle_path), "--step", f"{module}:step_fn"]
    assert main([*words, "--init", f"{module}:init_fn"]) == 0
    assert "first NaN: `sqrt` at " in capsys.readouterr().out


def test_a_step_without_its_init_is_refused(bundle_path, capsys):
    assert main(["replay", str(bundle_path), "--step", "a:b"]) == 2
    assert "`--step` and `--init` must be given together" in capsys.readouterr().err


def test_another_state_is_refused(bundle_path):
    with pytest.raises(ArgumentError, match="`--init` must make the state of the"):
        replay_step(read_bundle(bundle_path), step_fn, lambda key: {"w": 1.0})


def test_a_function_that_is_not_there_is_refused():
    with pytest.raises(ArgumentError, match="got 'nowhere:step_fn': No module"):
        load_function("nowhere:step_fn")


def test_a_bundle_without_arrays_cannot_be_replayed(tmp_path):
    path = write_bundle(tmp_path, Bundle(step=1, error={}, exported=b"x"))
    with pytest.raises(ArgumentError, match="to be replayed, got no state"):
        replay_recorded(read_bundle(path))


def test_a_step_that_cannot_be_recorded_leaves_the_arrays(tmp_path):
    def only_for_four(state, batch, key):
        raise ValueError("replica batches only")

    found = read_bundle(died(tmp_path, update=only_for_four))
    assert found.state
    assert found.exported is None


def test_what_fails_while_writing_hides_no_failure(tmp_path):
    (tmp_path / "postmortem").write_text("no directory")
    assert died(tmp_path) is None


def test_a_rebuild_gives_up_where_it_is_too_far():
    layout = replicas(1).layout
    with open_input(dataset(), layout) as batches:
        found = rebuild(
            lambda state, batch: (state, {}),
            None,
            batches,
            start_step=0,
            bad_step=5,
            most_calls=2,
        )
    assert found is None
