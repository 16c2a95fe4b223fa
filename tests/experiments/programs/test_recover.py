import json

import jax
import pytest

from experiments.programs import recover

SMALL = recover.Config(
    steps=16, every=3, kills=1, global_batch=8, width=8, lost_after_s=300
)


@pytest.mark.slow
def test_a_run_whose_island_is_killed_ends_with_the_bits_of_one_that_is_not(capsys):
    with jax.numpy_dtype_promotion("standard"):  # optax adds counts to floats
        recover.main(SMALL)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["equal"]
    assert found["repeated"] <= 3 * SMALL.every


def test_the_newest_state_that_is_there_is_found():
    class Lost:
        def __int__(self):
            raise recover.IslandLostError

    states = [{"step": 1}, {"step": 2}, {"step": Lost()}]
    assert recover._newest(states) == {"step": 2}
    with pytest.raises(ValueError, match="all states were lost"):
        recover._newest(states[2:])
