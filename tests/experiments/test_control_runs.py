"""Flags of continuous control that do not fit each other."""

import pytest

from experiments import control_runs, d4pg_control, sac_control
from replicator.errors import ArgumentError

ANAKIN = {"env": "pendulum", "scale": "anakin"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"least": 10},
            "`--least` must come with `--scale=process`, got 10 with anakin. Leave it",
        ),
        ({"n": 5}, "`--n` must come with `--scale=process`, got 5"),
        ({"exponent": 0.0}, "`--exponent` must come with"),
        ({"importance": 0.0}, "`--importance` must come with"),
        ({"actors": 4}, "`--actors` must come with `--scale=program`, got 4"),
        ({"env": "HalfCheetah-v5"}, "`--env` must be pendulum with `--scale=anakin`"),
        (
            {"capacity": 8},
            "`--capacity` must be at least 32, the transitions of a turn",
        ),
    ],
)
def test_flags_that_anakin_has_no_use_for_are_refused(change, message):
    with pytest.raises(ArgumentError, match=message):
        control_runs.check(d4pg_control.Config(**ANAKIN | change), 4)


@pytest.mark.parametrize("module", [d4pg_control, sac_control])
def test_an_agent_runs_as_anakin_with_the_flags_of_its_own(module):
    control_runs.check(module.Config(**ANAKIN), 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "`--capacity` must be at least 8192, a sample of 32 batches, got 1000"),
        ({"scale": "program"}, "at least 2048, a sample of 8 batches, got 1000"),
        (
            {"batch_size": 8},
            "at least 2000, that of `--least`, got 1000. Use 8000",
        ),
        (
            {"environments": 400, "batch_size": 8},
            "at least 4000, the transitions of an unroll, got 1000",
        ),
        (
            {"environments": 800, "scale": "program"},
            "at least 4000, the transitions of an unroll, got 1000",
        ),
    ],
)
def test_a_table_that_cannot_hold_a_sample_or_an_insert_is_refused(change, message):
    with pytest.raises(ArgumentError, match=message):
        control_runs.check(d4pg_control.Config(capacity=1_000, **change), 4)


def test_flags_of_a_program_are_for_programs():
    with pytest.raises(ArgumentError, match="`--launch_type` must come with `--scale="):
        control_runs.check(d4pg_control.Config(launch_type="ray"), 4)
