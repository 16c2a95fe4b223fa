"""The proof is right about programs whose truth is known."""

import itertools

import pytest

from benchmarks.proof.__main__ import is_deadlock, is_drift, judge, refusal
from benchmarks.proof.deadlocks import DEADLOCKS
from benchmarks.proof.right import RIGHT
from benchmarks.proof.wrong import WRONG

# It is the same by arithmetic, of which the proof knows none.
BEYOND = {"a ring of maxima"}


@pytest.mark.parametrize("name", WRONG)
def test_what_drifts_is_refused(name):
    assert is_drift(refusal(WRONG[name]))


@pytest.mark.parametrize("name", DEADLOCKS)
def test_what_hangs_is_refused(name):
    assert is_deadlock(refusal(DEADLOCKS[name]))


@pytest.mark.parametrize("name", sorted(RIGHT.keys() - BEYOND))
def test_what_agrees_is_accepted(name):
    assert refusal(RIGHT[name]) is None


@pytest.mark.parametrize("name", BEYOND)
def test_what_agrees_by_arithmetic_is_refused(name):
    assert is_drift(refusal(RIGHT[name]))


def test_a_program_that_is_not_what_it_is_said_to_be_is_counted(capsys):
    name, program = next(itertools.islice(RIGHT.items(), 0, None))
    counts = judge({name: program}, is_drift, agreeing=False)
    assert (counts.misjudged, counts.mislabelled, counts.broken) == (1, 1, 0)
    assert capsys.readouterr().out == f"{name}: accepted\n{name}: replicas agree\n"


def test_a_program_that_breaks_is_counted(capsys):
    counts = judge({"broken": lambda x, w, key: w.missing}, is_drift)
    assert (counts.misjudged, counts.mislabelled, counts.broken) == (0, 0, 1)
    assert capsys.readouterr().out.startswith("broken: AttributeError")
