"""Which rows samplers draw."""

import cloudpickle
import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.replay.removers import REMOVERS

SAMPLERS = [lp.uniform(), lp.prioritised(0.5), lp.fifo(), lp.lifo()]
NUMBERS = np.linspace(0, 1 - 2**-53, 4_000)


def draws_of(sampler, priorities):
    draws = sampler.start(16)
    draws.add(np.arange(len(priorities)), np.array(priorities, np.float64))
    return draws


@pytest.fixture(params=SAMPLERS, ids=lambda sampler: sampler.name)
def sampler(request):
    return request.param


def test_random_changes_leave_the_rows_that_were_not_removed(sampler):
    random, draws, there = np.random.default_rng(0), sampler.start(16), set()
    for _ in range(300):
        out = np.array([each for each in range(16) if each not in there])
        added = random.permutation(out)[: random.integers(1, 5)].astype(np.int64)
        draws.add(added, np.ones(len(added)))
        there |= set(added.tolist())
        gone = random.permutation(sorted(there))[: random.integers(0, 5)]
        draws.remove(gone.astype(np.int64))
        there -= set(gone.tolist())
        assert sorted(draws.rows()) == sorted(there)
        assert draws.size == len(there)


def test_a_sampler_travels_in_a_recipe(sampler):
    again = cloudpickle.loads(cloudpickle.dumps(sampler))
    slots, _ = draws_of(again, [1, 2]).draw(NUMBERS, None)
    assert set(slots.tolist()) <= {0, 1}


def test_probabilities_are_those_of_priorities_to_the_exponent():
    slots, chances = draws_of(lp.prioritised(0.5), [1, 4, 0, 9]).draw(NUMBERS, None)
    assert set(zip(slots.tolist(), chances.tolist(), strict=True)) == {
        (0, 1 / 6),
        (1, 2 / 6),
        (3, 3 / 6),
    }
    counts = np.bincount(slots) / len(slots)
    np.testing.assert_allclose(counts, [1 / 6, 2 / 6, 0, 3 / 6], atol=1e-3)


def test_a_row_of_priority_0_is_not_drawn_at_exponent_0():
    slots, chances = draws_of(lp.prioritised(0), [5, 0, 0.1]).draw(NUMBERS, None)
    assert set(slots.tolist()) == {0, 2}
    assert set(chances.tolist()) == {0.5}


@pytest.mark.parametrize("exponent", [0, 0.6, 8])
def test_priorities_of_all_magnitudes_can_be_drawn(exponent):
    draws = draws_of(lp.prioritised(exponent), [1e308, 1e-308, 5e-324])
    _, chances = draws.draw(NUMBERS, None)
    assert draws.size == 3
    assert np.isfinite(chances).all()
    assert (chances > 0).all()


def test_uniform_draws_all_alike_whatever_their_priorities():
    slots, chances = draws_of(lp.uniform(), [0, 1, 100, 3]).draw(NUMBERS, None)
    assert np.bincount(slots).tolist() == [1000] * 4
    assert set(chances.tolist()) == {0.25}


@pytest.mark.parametrize(
    ("sampler", "drawn"),
    [(lp.fifo(), [2, 2, 0, 3]), (lp.lifo(), [3, 0, 0, 0])],
    ids=["fifo", "lifo"],
)
def test_queues_draw_from_their_end_as_often_as_is_left(sampler, drawn):
    draws = sampler.start(4)
    draws.add(np.array([2, 0, 3]), np.ones(3))
    left = np.array([1 if drawn[0] == 2 else 3, 9, 2, 1])
    slots, chances = draws.draw(NUMBERS[:4], left)
    assert slots.tolist() == drawn
    assert chances.tolist() == [1.0] * 4


@pytest.mark.parametrize("exponent", [-0.1, 9, float("nan"), "much", None])
def test_an_exponent_that_is_none_is_refused(exponent):
    with pytest.raises(ArgumentError, match="`exponent` must be"):
        lp.prioritised(exponent)


@pytest.mark.parametrize("name", REMOVERS)
def test_a_remover_pops_in_its_order_whatever_left_before(name):
    removal = REMOVERS[name](8)
    removal.add(np.array([5, 1, 7, 0]), np.array([4.0, 1.0, 3.0, 2.0]))
    removal.remove(np.array([1]))
    removal.update(np.array([7]), np.array([9.0]))
    assert removal.pop(2).tolist() == {"oldest": [5, 7], "lowest": [0, 5]}[name]
    removal.add(np.array([1]), np.array([0.0]))
    assert removal.pop(1).tolist() == {"oldest": [0], "lowest": [1]}[name]
