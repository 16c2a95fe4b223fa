"""Samples follow from seed, number, rows and priorities: against plain lines."""

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.replay.turns.numbered_draws import NumberedDraws
from replicator.launchpad_bridge.replay.turns.ring_rows import RingRows

CAPACITY, SIZE, LAG, NEW = 7, 4, 2, 3


def new_draws(sampler=None, *, seed=5):
    sampler = lp.prioritised(0.5) if sampler is None else sampler
    lag = None if sampler.name == "uniform" else LAG
    ring = RingRows(CAPACITY, sampler)
    return NumberedDraws(ring, batch_size=SIZE, priority_lag=lag, seed=seed)


def values_of(batch):
    """Return priorities; some are 0, and of each third batch one keeps its own."""
    values = (np.arange(SIZE) * (batch + 1)) % 5 + 0.0
    values[0] = np.nan if batch % 3 == 0 else values[0]
    return values


def step(draws):
    """Insert rows, and draw; return what was drawn."""
    draws.ring.append(NEW)
    return draws.draw(draws.due())


def play(draws, count):
    """Return as many samples; all priorities come at once."""
    found = []
    for _ in range(count):
        found.append(step(draws))
        draws.receive(found[-1].keys, values_of(draws.batch - 1))
    return found


def plain(count, *, seed=5):
    """Return serials and probabilities, by lists and loops."""
    rows, largest, drawn, found = [], 0.0, [], []
    for batch in range(count):
        first = batch * NEW
        rows += [[first + k, largest or 1.0] for k in range(NEW)]
        rows = rows[-CAPACITY:]
        if batch >= LAG:
            due = zip(drawn[batch - LAG], values_of(batch - LAG), strict=True)
            for serial, value in due:
                for row in rows:
                    if row[0] == serial and np.isfinite(value):
                        row[1] = float(value)
                        largest = max(largest, row[1])
        masses = [priority**0.5 for _, priority in rows]
        numbers = np.random.default_rng([seed, batch]).random(SIZE) * sum(masses)
        # Stretches lie in the order of places.
        line = sorted(range(len(rows)), key=lambda k: rows[k][0] % CAPACITY)
        ends = np.cumsum([masses[k] for k in line])
        places = [line[np.searchsorted(ends, each, "right")] for each in numbers]
        drawn.append([rows[k][0] for k in places])
        found.append((drawn[-1], [masses[k] / sum(masses) for k in places]))
    return found


def test_samples_by_priority_are_those_of_plain_lines():
    for mine, (serials, probabilities) in zip(
        play(new_draws(), 40), plain(40), strict=True
    ):
        assert mine.serials.tolist() == serials
        np.testing.assert_allclose(mine.probabilities, probabilities, rtol=1e-12)


def test_uniform_samples_are_of_the_rows_held():
    for batch, sample in enumerate(play(new_draws(lp.uniform()), 30)):
        rows = range((batch + 1) * NEW)[-CAPACITY:]
        numbers = np.random.default_rng([5, batch]).random(SIZE)
        assert sample.serials.tolist() == [rows[int(u * len(rows))] for u in numbers]
        assert set(sample.probabilities) == {1 / len(rows)}


def test_another_seed_gives_other_samples():
    one, other = play(new_draws(), 9), play(new_draws(seed=6), 9)
    assert [each.serials.tolist() for each in one] != [
        each.serials.tolist() for each in other
    ]


def test_no_key_is_given_twice():
    keys = np.concatenate([each.keys for each in play(new_draws(), 9)])
    assert keys.tolist() == list(range(9 * SIZE))


def test_what_priorities_come_early_late_twice_or_in_parts_makes_no_difference():
    draws, samples = new_draws(), []
    for batch in range(12):
        if draws.awaited is not None:
            keys, values = samples[batch - LAG].keys, values_of(batch - LAG)
            draws.receive(keys[2:], values[2:])
            assert draws.awaited == batch - LAG
            draws.receive(keys[:3], values[:3])
        assert draws.awaited is None
        samples.append(step(draws))
        if batch > LAG:  # those applied before
            draws.receive(samples[0].keys, np.full(SIZE, 99.0))
    due = [each.serials.tolist() for each in samples]
    assert due == [serials for serials, _ in plain(12)]


@pytest.mark.parametrize("key", [-1, SIZE])
def test_a_key_that_was_not_given_is_refused(key):
    draws = new_draws()
    step(draws)
    with pytest.raises(ArgumentError, match="`keys` must be keys that this table gave"):
        draws.receive(np.array([key]), np.ones(1))


def test_saved_records_lead_to_the_same_samples():
    whole = play(new_draws(), 20)
    for at in range(1, 12):
        draws, others = new_draws(), new_draws()
        play(draws, at)
        others.restore(draws.to_saved())
        for batch in range(max(at - LAG, 0), at):  # those that wait come again
            others.receive(whole[batch].keys, values_of(batch))
        again = play(others, 20 - at)
        for mine, due in zip(again, whole[at:], strict=True):
            np.testing.assert_array_equal(mine.serials, due.serials)
            np.testing.assert_array_equal(mine.probabilities, due.probabilities)


def test_priorities_are_counted():
    draws = new_draws()
    play(draws, 20)
    applied = (20 - LAG) * SIZE
    nonfinite = len([batch for batch in range(20 - LAG) if batch % 3 == 0])
    counts = draws.counts
    assert counts["late"] > 0
    assert applied - nonfinite <= counts["updated"] + counts["late"] <= applied
