"""The mistakes of a first hour are enough, short, and judged by what they print."""

import re

import jax
import pytest

from benchmarks.first_hour.__main__ import MISTAKES
from benchmarks.first_hour.judge import Outcome, judge, lines_of
from benchmarks.first_hour.mistake import MOST_LINES, mistake

TRACE = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 3, in <module>
    rep.run(step_fn, dataset)
    ^^^^^^^^^^^^^^^^^^^^^^^^^
ValueError: `steps` must be whole. Pass an `int`.
"""
WRONG = mistake("steps", "rep.run()", "`steps`", remedy="Pass", quiet=True)


def test_there_are_as_many_mistakes_as_were_asked_for():
    assert len(MISTAKES) >= 120
    assert len({each.report for each in MISTAKES if each.report}) >= 20
    assert sum(each.quiet for each in MISTAKES) >= 30
    assert len({each.name for each in MISTAKES}) == len(MISTAKES)


def test_each_has_a_short_program_and_what_must_be_named():
    for each in MISTAKES:
        assert each.program.count("\n") < MOST_LINES
        assert each.right or (each.names and each.remedy), each.name
        assert not each.report or re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", each.report)


def test_a_good_answer_has_no_fault():
    assert not judge(WRONG, Outcome(code=1, errors=TRACE), None).detail


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (Outcome(code=None), "hung"),
        (Outcome(code=0), "silent"),
        (Outcome(code=1, errors=TRACE.replace("Pass", "See")), "failed"),
        (Outcome(code=1, errors=TRACE.replace("/home/me", jax.__path__[0])), "is_long"),
        (Outcome(code=1, errors=TRACE + "more\n" * 5), "is_long"),
    ],
)
def test_a_bad_answer_has_its_fault(found, fault):
    assert getattr(judge(WRONG, found, None), fault)


def test_a_mistake_that_changes_nothing_prints_what_the_right_program_does():
    same = mistake("twice", "print(1)", right="print(1)")
    one, other = (Outcome(code=0, printed=text) for text in ("1\n", "2\n"))
    assert not judge(same, one, one).detail
    assert judge(same, other, one).silent


def test_lines_of_a_group_are_counted_without_its_margin():
    group = "  | ExceptionGroup: both\n  +-+---- 1 ----\n    | ValueError: one\n"
    assert len(lines_of(group)[1]) == 3
