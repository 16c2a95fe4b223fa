import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks.truth.law import Oracles, problem
from benchmarks.truth.program import ALL, Refused, Same, Setting
from benchmarks.truth.programs import PROGRAMS
from benchmarks.truth.worker import chosen_settings

BY_NAME = {program.name: program for program in PROGRAMS}


@pytest.fixture(autouse=True)
def lenient_types():
    # Programs of strangers mix dtypes and ranks; our own code stays strict elsewhere.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def found(program):
    return problem(program, Setting(2, 2), Oracles()) or "nothing"


@pytest.mark.parametrize(
    "name",
    [
        "mlp-padding-count",
        "importance-sampling-importances-count",
        "update-twice-refused",
    ],
)
def test_program_is_as_its_oracle_says(name):
    assert found(BY_NAME[name]) == "nothing"


def test_wrong_oracle_is_found_and_the_leaf_named():
    right = BY_NAME["lagrangian-weight"]

    def wrong(setting):
        init, step = right.oracle(setting)

        def spoilt(state, batch):
            after, metrics = step(state, batch)
            after["opt"]["primal"][0].trace["w"] *= 1 + 1e-7
            return after, metrics

        return init, spoilt

    told = found(dataclasses.replace(right, oracle=wrong, updates=1))
    assert "`opt/primal/0/trace/w` is off by" in told


def test_accepted_program_that_must_be_refused_is_a_failure():
    expect = Refused(by="ArgumentError", word="never said")
    told = found(dataclasses.replace(BY_NAME["lagrangian-weight"], expect=expect))
    assert told.startswith("accepted, and must be refused")


def test_program_that_raises_is_a_failure_and_not_the_end():
    def broken(rep, setting):
        init, _ = BY_NAME["lagrangian-weight"].ours(rep, setting)
        return init, lambda state, batch: jnp.zeros(1) @ jnp.zeros(2)

    program = dataclasses.replace(BY_NAME["lagrangian-weight"], ours=broken)
    assert "Error at" in found(program)


def test_every_setting_is_visited_by_many_programs():
    visits = [s for p in PROGRAMS for s in chosen_settings(p, full=False)]
    assert all(visits.count(setting) >= 10 for setting in ALL)


def test_there_are_sixty_programs_with_an_oracle_and_tight_tolerances():
    same = [p for p in PROGRAMS if p.oracle and isinstance(p.expect, Same)]
    assert len(same) >= 60
    assert all(p.expect.tolerance <= 1e-6 for p in same if p.wide)
