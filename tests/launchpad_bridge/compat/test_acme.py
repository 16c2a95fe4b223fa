"""Acme's own counters, environment loop and limiter of steps, unmodified.

Its limiter looks every ten seconds, and so do these tests wait.
"""

import json
from pathlib import Path

import pytest

from tests.launchpad_bridge.compat.scripts import run
from tests.launchpad_bridge.compat.wheel import acme

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("acme_program.py")
ACTORS, STEPS = 2, 5


@pytest.fixture(scope="module")
def source(request, tmp_path_factory):
    """Return the folder of the package `acme`."""
    pytest.importorskip("dm_env")
    pytest.importorskip("tree")
    return acme(request.config.cache, tmp_path_factory.mktemp("acme"))


@pytest.mark.parametrize(("launch", "dies"), [("local_mt", False), ("local_mp", True)])
def test_the_limiter_ends_a_program_that_counted_each_step_once(
    launch, dies, source, tmp_path
):
    flags = [f"--lp_launch_type={launch}", f"--folder={tmp_path}", f"--dies={dies}"]
    status, out = run([PROGRAM, *flags], folder=tmp_path, path=[source])
    assert status == 0, out
    assert (tmp_path / "died").exists() is dies
    played = len((tmp_path / "episodes").read_text())
    lines = (tmp_path / "counted").read_text().splitlines()
    counted = max(json.loads(line)["actor_episodes"] for line in lines)
    # The stop, not the death, may have cut actors between an episode and its count.
    assert played - ACTORS <= counted <= played
    assert max(json.loads(line)["actor_steps"] for line in lines) == STEPS * counted
    assert counted * STEPS > 100
