import pytest

from experiments.programs import recover
from tests.experiments.command import found_by


@pytest.mark.slow
def test_a_run_whose_island_is_killed_ends_with_the_bits_of_one_that_is_not():
    sizes = "--global_batch=8", "--width=8"
    found = found_by("programs.recover", "--steps=16", "--every=3", "--kills=1", *sizes)
    assert found["equal"]
    assert found["repeated"] <= 9


def test_the_newest_state_that_is_there_is_found():
    class Lost:
        def __int__(self):
            raise recover.IslandLostError

    states = [{"step": 1}, {"step": 2}, {"step": Lost()}]
    assert recover._newest(states) == {"step": 2}
    with pytest.raises(ValueError, match="all states were lost"):
        recover._newest(states[2:])
