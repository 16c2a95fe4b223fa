"""What the README of the wing shows runs, and what it names is there."""

import re

import replicator.launchpad_bridge as lp
from tests.launchpad_bridge.readme import BLOCKS, README, block_with, names_of


def test_its_first_program_runs_and_prints_what_an_actor_returned(capsys):
    names_of(BLOCKS[0])
    numbers = eval(capsys.readouterr().out)
    assert len(numbers) == 10


def test_its_launcher_for_slurm_has_at_most_forty_lines():
    lines = [line for line in block_with("class Slurm").splitlines() if line.strip()]
    assert len(lines) <= 40


def test_each_name_that_it_uses_exists():
    names = set(re.findall(r"\blp\.([A-Za-z_]+)", README))
    assert names <= set(lp.__all__) | {"md"}, names - set(lp.__all__)


def test_each_name_is_public_once():
    assert len(lp.__all__) == len(set(lp.__all__))
    assert all(hasattr(lp, name) for name in lp.__all__)
