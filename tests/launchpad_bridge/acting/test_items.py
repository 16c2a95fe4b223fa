"""Items are what a plain loop over the steps of each episode makes."""

import jax
import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ArgumentError
from tests.launchpad_bridge.acting.tables import FreeTable, TurnTable
from tests.launchpad_bridge.acting.test_actor import make_actor, run_turns
from tests.launchpad_bridge.acting.test_environments import equal

SIZE = 3
LENGTHS = [(1, 1), (1, 3), (4, 3), (7, 5), (20, 3), (3, 12)]  # of an unroll; n


def walk(rng, steps):
    """Return one environment's steps: episodes of 1 to 9, every other cut by time."""
    names = ("observation", "first", "last", "age", "reward", "discount", "action")
    found = {name: [] for name in names}
    age = end = 0
    for t in range(steps + 1):
        first = t == 0 or found["last"][-1]
        if first:
            age, end = 0, rng.integers(1, 10)
        else:
            age += 1
        last = age == end
        if t:
            reward = 0.0 if first else rng.normal()
            found["reward"].append(reward)
            found["discount"].append(float(not first and not (last and end % 2)))
            found["action"].append(rng.normal(size=2))
        found["observation"].append(rng.integers(256, size=3))
        found["first"].append(first)
        found["last"].append(last)
        found["age"].append(age)
    return found


def walks(steps, seed=0):
    rng = np.random.default_rng(seed)
    kinds = {"observation": np.uint8, "first": bool, "last": bool, "age": np.int32}
    rows = [walk(rng, steps) for _ in range(SIZE)]
    return {
        name: np.array([row[name] for row in rows], kinds.get(name, np.float32))
        for name in rows[0]
    } | {"extras": {}, "core": ()}


def unrolls(steps, length):
    """Cut steps into unrolls that overlap by an observation."""
    is_seen = ("observation", "first", "last", "age")
    for at in range(0, steps["reward"].shape[1], length):
        yield {
            name: leaf
            if name in ("extras", "core")
            else leaf[:, at : at + length + (name in is_seen)]
            for name, leaf in steps.items()
        }


def made(items, steps, length, *, ends=False):
    """Return the items of all unrolls, each of which `ends`, or only the last."""
    found, waiting, parts = [], None, list(unrolls(steps, length))
    for index, part in enumerate(parts, 1):
        rows, waiting = items(part, waiting, ends=ends or index == len(parts))
        if rows is not None:
            found.append(rows)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *found)


def episodes(steps):
    """Yield (environment, first step, last step) of each episode and its rest."""
    for env in range(SIZE):
        start = 0
        for t in range(steps["last"].shape[1]):
            if steps["last"][env, t]:
                yield env, start, t
                start = t + 1
        if start < steps["last"].shape[1] - 1:
            yield env, start, steps["last"].shape[1] - 1


def plain_n_step(steps, n, gamma):
    rows = []
    for env, begin, end in episodes(steps):
        for t in range(begin, end):
            total, factor = 0.0, 1.0
            for k in range(t, min(t + n, end)):
                total += factor * steps["reward"][env, k]
                factor *= gamma * steps["discount"][env, k]
            following = steps["observation"][env, min(t + n, end)]
            now = (*steps["observation"][env, t], *steps["action"][env, t])
            rows.append((*now, total, factor, *following))
    return np.array(sorted(rows))


def plain_sequences(steps, length, overlap):
    rows = []
    for env, begin, end in episodes(steps):
        for t in range(begin, end, length - overlap):
            count = min(length, end - t)
            if count <= overlap and t != begin:
                continue
            seen = [min(t + k, end) for k in range(length + 1)]
            acted = [min(t + k, end - 1) for k in range(length)]
            is_in = np.arange(length) < count
            rows.append(
                (
                    *steps["observation"][env, seen].ravel(),
                    *steps["first"][env, seen],
                    *steps["action"][env, acted].ravel(),
                    *steps["reward"][env, acted] * is_in,
                    *steps["discount"][env, acted] * is_in,
                    *is_in,
                )
            )
    return np.array(sorted(rows))


def flat(rows, names):
    count = len(rows["reward"])
    parts = [np.asarray(rows[name], float).reshape(count, -1) for name in names]
    return np.array(sorted(map(tuple, np.concatenate(parts, axis=1))))


TRANSITION = ("observation", "action", "reward", "discount", "next_observation")
SEQUENCE = ("observation", "first", "action", "reward", "discount", "mask")


@pytest.mark.parametrize(("unroll", "n"), LENGTHS)
def test_transitions_are_those_of_a_plain_loop(unroll, n):
    steps = walks(60)
    found = flat(made(lp.n_step(n, discount=0.9), steps, unroll), TRANSITION)
    np.testing.assert_allclose(found, plain_n_step(steps, n, 0.9), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("unroll", "length", "overlap"), [(1, 3, 1), (5, 4, 2), (7, 6, 5), (20, 12, 6)]
)
def test_sequences_are_those_of_a_plain_loop(unroll, length, overlap):
    steps = walks(60)
    items = lp.sequences(length=length, overlap=overlap)
    found = flat(made(items, steps, unroll), SEQUENCE)
    np.testing.assert_allclose(found, plain_sequences(steps, length, overlap))


@pytest.mark.parametrize("n", [1, 3, 12])
def test_unrolls_that_end_are_cut_as_an_episode_that_time_cuts(n):
    steps, items = walks(60), lp.n_step(n, discount=0.9)
    found = flat(made(items, steps, 6, ends=True), TRANSITION)
    alone = [plain_n_step(part, n, 0.9) for part in unrolls(steps, 6)]
    due = np.array(sorted(map(tuple, np.concatenate(alone))))
    np.testing.assert_allclose(found, due, rtol=1e-5, atol=1e-6)


def test_items_keep_the_dtypes_of_their_steps():
    rows = made(lp.n_step(3, discount=0.9), walks(20), 5)
    assert rows["observation"].dtype == rows["next_observation"].dtype == np.uint8
    assert rows["reward"].dtype == rows["discount"].dtype == np.float32


def test_a_window_of_another_environment_does_not_wait():
    steps = walks(30)
    items = lp.n_step(4, discount=0.9)
    each = [
        made(items, jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], steps), 5)
        for i in range(SIZE)
    ]
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *each)
    together = made(items, steps, 5)
    assert equal(flat(joined, TRANSITION), flat(together, TRANSITION))


ITEMS = lp.n_step(5, discount=0.9)


def test_an_actor_inserts_items_and_each_episode_once():
    table = FreeTable()
    counts = make_actor(table, items=ITEMS, unroll_length=2, episodes=30).run()
    inserted = [rows for _, _, rows, _ in table.inserted]
    assert counts["trajectories"] == sum(len(rows["reward"]) for rows in inserted)
    ended = [each for *_, episodes in table.inserted for each in episodes]
    assert counts["episodes"] == len(ended)


def test_an_actor_that_was_killed_goes_on_with_the_steps_that_wait():
    options = {"items": ITEMS, "unroll_length": 3}
    whole = run_turns(TurnTable(), **options)
    table = run_turns(TurnTable(), turns=4, **options)
    run_turns(table, **options)
    assert equal(table.turns, whole.turns)
    assert table.episodes == whole.episodes


def test_items_of_one_episode_wait_for_no_other():
    table = run_turns(TurnTable(), items=ITEMS, one_episode_per_trajectory=True)
    assert all(rows["reward"].shape[0] >= 2 for rows in table.turns)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: lp.n_step(0, discount=0.9), "n"),
        (lambda: lp.n_step(3, discount=1.5), "discount"),
        (lambda: lp.sequences(length=4, overlap=4), "overlap"),
        (lambda: make_actor(FreeTable(), items=3), "items"),
    ],
)
def test_items_that_cannot_be_are_refused(make, named):
    with pytest.raises(ArgumentError, match=f"`{named}` must"):
        make()
