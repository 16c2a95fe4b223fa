"""Problems of files: found, called, and refused where they are none."""

import pytest

from replicator import Replicator
from replicator.errors import ArgumentError
from replicator.tuning.problem import ProblemFile, problem_from
from tests.tuning import problems


def test_a_problem_has_a_step_a_state_and_shapes():
    found = problem_from(problems.problem, Replicator())
    assert (found.batch, found.examples) == (problems.BATCH, 16)


def test_a_function_of_a_file_is_loaded():
    file = ProblemFile.from_text(f"{problems.__file__}:problem")
    assert file.load().__name__ == "problem"


@pytest.mark.parametrize(
    "text", ["train.py", "no/such.py:problem", f"{problems.__file__}:"]
)
def test_a_place_that_is_none_is_refused(text):
    with pytest.raises(ArgumentError, match="must name a Python file that is there"):
        ProblemFile.from_text(text)


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (problems.reads_data, r"got FileNotFoundError: .*, at problems.py:\d+"),
        (problems.returns_a_dataset, "leading axis of examples, got <.*iterator"),
        (problems.takes_data, r"must take \(rep\), got \(rep, dataset\)"),
        (lambda rep: None, "tuple of step_fn, init_fn and the shapes"),
        (lambda rep: (1, 2, 3), "`step_fn` must be a function"),
    ],
)
def test_what_is_no_problem_is_refused(function, part):
    with pytest.raises(ArgumentError, match=part):
        problem_from(function, Replicator())
