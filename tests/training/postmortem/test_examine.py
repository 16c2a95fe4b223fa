"""Which failures are examined, and what happens when that fails, too."""

import jax
import pytest
from jax.experimental import checkify

from replicator.errors import BatchError, NonFiniteError, SpikeError
from replicator.training.postmortem.bundle import read_bundle
from replicator.training.postmortem.examine import (
    RecordsFailure,
    examine,
    is_met_by_all,
)
from replicator.training.run_spec import RunSpec
from tests.steps import replicas
from tests.training.postmortem.crashing import init_fn, step_fn


def failing(failure):
    def step(state, batch):
        raise failure

    return step


def test_a_failure_of_the_step_is_that_of_the_next_step():
    failure = ZeroDivisionError()
    blamed = RecordsFailure(failing(failure))
    with pytest.raises(ZeroDivisionError):
        blamed(None, None)
    assert blamed.bad_step(failure, dispatched=6) == 7
    assert blamed.bad_step(ZeroDivisionError(), dispatched=6) is None


@pytest.mark.parametrize("kind", [NonFiniteError, SpikeError])
def test_a_bad_number_says_its_step_itself(kind):
    failure = kind("bad", step=3, leaf="loss")
    assert RecordsFailure(failing(None)).bad_step(failure, dispatched=9) == 3


def test_what_we_refuse_ourselves_needs_no_examination():
    failure = BatchError("no")
    blamed = RecordsFailure(failing(failure))
    with pytest.raises(BatchError):
        blamed(None, None)
    assert blamed.bad_step(failure, dispatched=6) is None


@pytest.mark.parametrize(
    ("failure", "by_all"),
    [
        (NonFiniteError("bad", step=3), True),
        (SpikeError("bad", step=3), True),
        (checkify.JaxRuntimeError("replica 1: too small"), True),
        (jax.errors.JaxRuntimeError("the other end is gone"), False),
        (ZeroDivisionError(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_processes_examine_together_what_all_of_them_meet(failure, by_all):
    assert is_met_by_all(failure) is by_all


def read_badly(context):
    raise OSError("the disk is gone")


class TogetherAlone(RunSpec):
    """A run that all processes make, of which there is one."""

    together = True


@pytest.mark.parametrize("kind", [RunSpec, TogetherAlone])
@pytest.mark.parametrize("dataset", [read_badly, None])
def test_what_cannot_be_rebuilt_leaves_the_error_alone(tmp_path, dataset, kind):
    session = replicas(2).session(
        step_fn, dataset, init_fn=init_fn, steps=5, seed=7, directory=tmp_path
    )
    spec = kind(**vars(session._spec))
    path = examine(spec, tmp_path, NonFiniteError("bad", step=3, leaf="loss"), 3)
    found = read_bundle(path)
    assert (found.state, found.batch, found.about["seed"]) == (None, None, 7)
    assert found.error["type"] == "NonFiniteError"
