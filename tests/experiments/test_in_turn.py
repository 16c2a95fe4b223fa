"""An agent that acts and learns in one process, over sittings."""

import dataclasses
import json

import numpy as np
import pytest

import replicator
from experiments import in_turn, run_folder, seeds
from experiments.impala_catch import make_agent, make_boards
from replicator.launchpad_bridge.acting import EnvironmentFailedError
from tests.experiments.test_seeds import CATCH

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Failing:
    """Boards that fail after so many steps."""

    can_snapshot = False

    def __init__(self, steps):
        self._inner, self._left = make_boards(16), steps
        self.size, self.reset = self._inner.size, self._inner.reset

    def step(self, actions):
        self._left -= 1
        if self._left < 0:
            raise OSError("the power failed")
        return self._inner.step(actions)


def test_episodes_behind_the_last_checkpoint_are_played_again(tmp_path):
    config = dataclasses.replace(CATCH, steps=6, directory=str(tmp_path))
    options = seeds.options_of(config, 0) | {"saved_every_s": 1e-6}
    rep, agent = replicator.Replicator(1), make_agent(config)
    with pytest.raises(EnvironmentFailedError):
        in_turn.learn(rep, agent, Failing(4 * 12 + 5), **options)
    folder = tmp_path / "seed-0"
    saved = run_folder.last_saved(folder)
    lines = (folder / "returns.jsonl").read_text().splitlines()
    kept = [each for each in map(json.loads, lines) if each[0] <= saved]
    found = in_turn.learn(rep, agent, make_boards(16), **options)
    assert (found.begun, found.updates) == (saved, 6)
    assert [list(each) for each in found.returns[: len(kept)]] == kept
    assert {update for update, _ in found.returns[len(kept) :]} == {
        *range(saved + 1, 7)
    }


def test_an_unroll_is_cut_into_batches_in_order():
    rows = {"action": np.arange(12).reshape(6, 2), "extras": {"a": np.arange(6)}}
    batches = in_turn.cut(rows, 2)
    starts = [each["action"][:, 0].tolist() for each in batches]
    assert starts == [[0, 2], [4, 6], [8, 10]]
    assert [each["extras"]["a"].tolist() for each in batches] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
