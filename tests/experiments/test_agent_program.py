"""An agent as a program; `test_seeds` has what holds at all scales."""

import functools

import pytest

from experiments import agent_program, seeds
from experiments.impala_catch import make_agent, make_boards
from replicator.errors import ArgumentError
from tests.experiments.test_seeds import CATCH


@pytest.mark.slow
def test_a_sitting_in_which_no_learner_began_is_refused_by_its_flag():
    with pytest.raises(ArgumentError, match=r"`--minutes` must be enough .* got 1e-06"):
        agent_program.learn(
            make_agent(CATCH),
            functools.partial(make_boards, 8),
            "threads",
            minutes=1e-6,
            actors=2,
            **seeds.options_of(CATCH, 0),
        )
