"""`make nightly` fails where a number misses its bar, or a benchmark breaks."""

import re
from pathlib import Path

import pytest

from benchmarks.hold import hold

MAKEFILE = Path(__file__).parents[2] / "Makefile"


def test_a_benchmark_that_is_none_is_refused(capsys):
    assert hold("kill_resum", []) == 2
    assert "got 'kill_resum'. Use one of step_overhead, " in capsys.readouterr().out


@pytest.mark.slow
def test_one_that_breaks_reaches_no_bar(capsys):
    assert hold("corruption", ["--cases=none"]) == 1
    assert "missed: corruption silent broke, bar == 0" in capsys.readouterr().out


def test_every_benchmark_of_the_night_is_held_to_its_bars():
    _, _, recipe = MAKEFILE.read_text().partition("\nnightly:")
    commands = re.findall(r"^\t.*-m benchmarks\S*.*$", recipe.split("\n\n")[0], re.M)
    assert len(commands) >= 3
    assert all(" -m benchmarks.hold " in command for command in commands)


@pytest.mark.slow
def test_a_number_that_misses_its_bar_fails(capfd):
    # On no devices each run fails.
    assert hold("no_hang", ["--runs=1", "--steps=1", "--devices=0"]) == 1
    assert "missed: no_hang failures 1, bar == 0" in capfd.readouterr().out


@pytest.mark.slow
def test_numbers_that_reach_their_bars_do_not():
    assert hold("corruption", ["--cases=20"]) == 0
