"""Hold replay tables to a plain one that does one row at a time.

Draws follow the exact distribution while priorities move between them (Pearson's
chi-square over all phases), with the probabilities and importance weights that it
gives; a limiter lets pass what Reverb's rule does, and its bound is never passed by
one; keys are of one row each; removers take the same rows; rows go once they were drawn
as often as they may be; items end with their episodes. Prints what is
broken, and one JSON object.
"""

import collections
import concurrent.futures
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.stats
from absl import app, flags

import replicator.launchpad_bridge as lp
from benchmarks.replay_plain import (
    CAPACITY,
    PlainTable,
    PlainWalk,
    may_insert,
    may_take,
    plain_walk,
)
from replicator.launchpad_bridge.replay.samplers import ReplaySampler
from replicator.launchpad_bridge.trajectories.table import Taken

_DRAWS = flags.DEFINE_integer("draws", 1_000_000, "Of each random sampler.")
_MOVES = flags.DEFINE_integer("moves", 2_000, "Of removers, and of limiters.")

_PHASES = 20
_BATCH = 100
_BETA = 0.4  # of importance weights
_LEAST_CELL = 10  # draws expected of a cell of the test
_LEAST_CHANCE = 1e-6  # of a sound table, of which a few are tested
_LONG_S = 60.0


def draws_follow(sampler: ReplaySampler, exponent: float | None) -> Iterator[str]:
    """Draw in phases; insert and move priorities between them."""
    table, plain = lp.ReplayTable(CAPACITY, sampler=sampler), PlainTable()
    random, numbers = np.random.default_rng(0), itertools.count()
    square, freedom = 0.0, 0
    for phase in range(_PHASES):
        _insert(table, plain, numbers, _priorities(random, 30 if phase else CAPACITY))
        _insert(table, plain, numbers, None)
        chances = plain.chances(exponent)
        counts = dict.fromkeys(chances, 0)
        for _ in range(max(_DRAWS.value // _PHASES // _BATCH, 1)):
            taken = _draw(table, _BATCH)
            yield from _wrong_chances(taken, chances)
            for number in _ids(taken):
                counts[number] += 1
        if any(count and not chances[number] for number, count in counts.items()):
            yield "a row of priority 0 was drawn"
        found = _square(counts, chances)
        square, freedom = square + found[0], freedom + found[1]
        moved, values = _draw(table, _BATCH), _priorities(random, _BATCH)
        table.update_priorities(_keys(moved), values)  # many of them twice
        plain.update(dict(zip(_ids(moved), values.tolist(), strict=True)))
    chance = float(scipy.stats.chi2.sf(square, freedom))
    test = f"chi-square {square:.0f}, {freedom} free: {chance:.2g}"
    print(f"{sampler.name} {exponent}: {test}")
    if chance < _LEAST_CHANCE:
        yield f"draws like these have a chance of {chance:.2g}"


def keys_are_of_one_row() -> Iterator[str]:
    """Compare ids and keys of all rows drawn, over many times the capacity."""
    table, plain, numbers = lp.ReplayTable(CAPACITY), PlainTable(), itertools.count()
    rows: dict[int, int] = {}
    random = np.random.default_rng(1)
    late = 0
    for _ in range(_MOVES.value):
        _insert(table, plain, numbers, _priorities(random, int(random.integers(1, 40))))
        taken = _draw(table, _BATCH)
        for key, number in zip(_keys(taken).tolist(), _ids(taken), strict=True):
            if rows.setdefault(key, number) != number:
                yield f"key {key} is of {rows[key]} and of {number}"
        keys = random.choice(np.array([*rows]), 10)
        table.update_priorities(keys, np.ones(10))
        late += sum(rows[key] not in plain.rows for key in keys.tolist())
        if table.statistics()["late"] != late:
            yield f"{table.statistics()['late']} updates are late, not {late}"


def removers_remove(remover: str, sampler: ReplaySampler) -> Iterator[str]:
    """Insert, draw and move priorities; compare the rows that are held."""
    most = 3
    table = lp.ReplayTable(
        CAPACITY,
        sampler=sampler,
        remover=remover,  # type: ignore[arg-type]
        max_times_sampled=most,
    )
    plain, random = PlainTable(remover), np.random.default_rng(2)
    numbers = itertools.count()
    for _ in range(_MOVES.value):
        # No two are equal: any of them would be right.
        _insert(table, plain, numbers, random.random(int(random.integers(1, 40))))
        taken = _draw(table, int(random.integers(1, 20)))
        for number in _ids(taken):
            if number not in plain.rows:
                yield f"row {number} was drawn, and had gone"
                return
            plain.draw(number, most)
        values = random.random(len(taken.versions))
        table.update_priorities(_keys(taken), values)
        plain.update(dict(zip(_ids(taken), values.tolist(), strict=True)))
        if table.statistics()["held"] != len(plain.rows):
            yield f"{table.statistics()['held']} rows are held, not {len(plain.rows)}"


def limiters_limit(ratio: float, min_size: int) -> Iterator[str]:
    """Insert and draw one by one; compare who waits, and look at the bound."""
    error = 3 * max(1.0, ratio)
    limiter = lp.RateLimiter(min_size=min_size, samples_per_insert=ratio, error=error)
    table = lp.ReplayTable(CAPACITY, limiter=limiter)
    plain, numbers = PlainTable(), itertools.count()
    random = np.random.default_rng(3)
    for _ in range(_MOVES.value // 4):
        counts = plain.inserted, plain.taken
        if random.random() < 0.5:
            if may_insert(limiter, *counts):
                _insert(table, plain, numbers, np.ones(1))
        elif (table.take(1, timeout_s=0) is not None) != may_take(limiter, *counts):
            yield f"a draw is let pass, or not, after {counts}"
        else:
            plain.taken += may_take(limiter, *counts)
        yield from _past(limiter, table)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        while may_insert(limiter, plain.inserted, plain.taken):
            _insert(table, plain, numbers, np.ones(1))
        late = pool.submit(_insert, table, plain, numbers, np.ones(1))
        until_s = time.monotonic() + _LONG_S
        while not table.statistics()["blocked"] and time.monotonic() < until_s:
            time.sleep(0.001)
        if late.done():
            yield "an insert passed the bound"
        while not late.done() and time.monotonic() < until_s:
            table.take(1, timeout_s=0.01)
        late.result(_LONG_S)


def bound_holds_for_all_at_once() -> Iterator[str]:
    """Insert from four threads and draw in two, with a third that looks."""
    limiter = lp.RateLimiter(min_size=20, samples_per_insert=2, error=40)
    table, stop = lp.ReplayTable(CAPACITY, limiter=limiter), threading.Event()

    def insert(size: int) -> None:
        for _ in range(_MOVES.value // 4):
            _put(table, range(size), None)

    def draw(size: int) -> None:
        while not stop.is_set():
            table.take(size, timeout_s=0.05)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        inserting = [pool.submit(insert, size) for size in (1, 2, 5, 9)]
        drawing = [pool.submit(draw, size) for size in (1, 30)]
        until_s = time.monotonic() + 2 * _LONG_S
        while not all(each.done() for each in inserting):
            yield from _past(limiter, table)
            if time.monotonic() > until_s:
                yield f"all wait: {table.statistics()}"
                break
        stop.set()
        for each in (*inserting, *drawing):
            each.result(_LONG_S)


def _square(counts: dict[int, int], chances: dict[int, float]) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom; small cells are one."""
    drawn = sum(counts.values())
    cells = [
        (float(counts[n]), drawn * chance) for n, chance in chances.items() if chance
    ]
    large = [cell for cell in cells if cell[1] >= _LEAST_CELL]
    small = [cell for cell in cells if cell[1] < _LEAST_CELL]
    counted, expected = (sum(cell[side] for cell in small) for side in (0, 1))
    if expected >= _LEAST_CELL:
        large.append((counted, expected))
    elif small:
        large[0] = (large[0][0] + counted, large[0][1] + expected)
    square = sum((count - expected) ** 2 / expected for count, expected in large)
    return square, len(large) - 1


def items_end_with_episodes(length: int) -> Iterator[str]:
    """Make items of unrolls, through a table; compare them with plain episodes."""
    gamma, most = 0.9, 3
    walk = plain_walk(np.random.default_rng(4), steps=40 * length)
    due = collections.Counter(
        (number, age) for number, size in walk.sizes.items() for age in range(size)
    )
    for row in _through(lp.n_step(most, discount=gamma), walk, length):
        number, age = map(int, row["observation"])
        last = min(age + most, walk.sizes[number])
        reward = sum(
            gamma ** (k - age) * walk.reward(number, k + 1) for k in range(age, last)
        )
        chance = gamma ** (last - age) * walk.discount(number, last)
        due[number, age] -= 1
        if not np.allclose(row["reward"], reward) or not np.allclose(
            row["discount"], chance
        ):
            yield f"{most} steps of episode {number} from {age} on are {row}"
        if row["next_observation"].tolist() != [number, last]:
            yield f"a row of episode {number} ends at {row['next_observation']}"
    if any(due.values()):
        yield f"transitions are missing, or there twice: {[*filter(due.get, due)][:3]}"
    covered = set()
    for row in _through(lp.sequences(length=5, overlap=2), walk, length):
        number, age = map(int, row["observation"][0])
        size = int(row["mask"].sum())
        wanted = [[number, min(age + k, age + size)] for k in range(6)]
        rewards = [walk.reward(number, age + k + 1) for k in range(size)]
        if row["observation"].tolist() != wanted or age + size > walk.sizes[number]:
            yield f"a sequence of episode {number} is {row['observation'].tolist()}"
        if row["reward"].tolist() != rewards + [0] * (5 - size):
            yield f"a sequence of episode {number} has rewards {row['reward']}"
        covered |= {(number, age + k) for k in range(size)}
    if covered != set(due):
        yield f"no sequence has {sorted(set(due) - covered)[:3]}"


def _through(
    items: Any, walk: PlainWalk, length: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the items of unrolls of a walk, once a table has had them."""
    table = lp.ReplayTable(10_000, sampler=lp.fifo(), max_times_sampled=1)
    waiting, count = None, 0
    for unrolled, ends in walk.unrolls(length):
        rows, waiting = items(unrolled, waiting, ends=ends)
        if rows is not None:
            table.insert(rows, actor="actor/0", version=0)
            count += len(rows["reward"])
    rows = _draw(table, count).trajectories
    for k in range(count):
        yield {name: leaf[k] for name, leaf in rows.items() if name != "extras"}


def _past(limiter: lp.RateLimiter, table: lp.ReplayTable) -> Iterator[str]:
    counts = table.statistics()
    ratio, error = limiter.samples_per_insert or 0.0, limiter.error or 0.0
    ahead = ratio * counts["inserted"] - counts["taken"] - ratio * limiter.min_size
    if ahead > error or (counts["taken"] and ahead < -error):
        yield f"the bound {error} is passed: {ahead}"


def _wrong_chances(taken: Taken, chances: dict[int, float]) -> Iterator[str]:
    """Compare probabilities, and the weights (N P(i)) ** -beta, of a sample."""
    exact = np.array([chances[number] for number in _ids(taken)])
    given = np.asarray(taken.probabilities)
    if not np.allclose(given, exact, rtol=1e-9, atol=0):
        yield f"probabilities are off by {np.abs(given / exact - 1).max():.2g}"
    weights, right = ((len(chances) * p) ** -_BETA for p in (given, exact))
    if not np.allclose(weights / weights.max(), right / right.max(), rtol=1e-9):
        yield "importance weights are wrong"


def _insert(
    table: lp.ReplayTable,
    plain: PlainTable,
    numbers: Iterator[int],
    priorities: np.ndarray | None,
) -> None:
    """Insert rows into both; one row of the default priority for None."""
    count = 1 if priorities is None else len(priorities)
    ids = list(itertools.islice(numbers, count))
    _put(table, ids, priorities)
    values = [None] if priorities is None else priorities.tolist()
    plain.insert(dict(zip(ids, values, strict=True)))


def _put(table: lp.ReplayTable, ids: Any, priorities: np.ndarray | None) -> None:
    rows = {"reward": np.zeros(len(ids)), "id": np.array(ids)}
    table.insert(rows, actor="actor/0", version=0, priorities=priorities)


def _draw(table: lp.ReplayTable, count: int) -> Taken:
    taken = table.take(count, timeout_s=_LONG_S)
    assert taken is not None, table.statistics()["waits_for"]
    return taken


def _ids(taken: Taken) -> list[int]:
    return taken.trajectories["id"].tolist()


def _keys(taken: Taken) -> np.ndarray:
    return np.asarray(taken.keys)


def _priorities(random: np.random.Generator, count: int) -> np.ndarray:
    """Return priorities of several magnitudes, one in ten 0."""
    return 10.0 ** random.uniform(-2, 1, count) * (random.random(count) > 0.1)


LAWS: dict[str, Callable[[], Iterator[str]]] = {
    "uniform": lambda: draws_follow(lp.uniform(), None),
    **{
        f"prioritised {exponent}": functools.partial(
            draws_follow, lp.prioritised(exponent), exponent
        )
        for exponent in (0.0, 0.6, 1.0)
    },
    "keys": keys_are_of_one_row,
    **{
        f"{remover}, {sampler.name}": functools.partial(
            removers_remove, remover, sampler
        )
        for remover in ("oldest", "lowest")
        for sampler in (lp.uniform(), lp.fifo(), lp.lifo())
    },
    **{
        f"limiter of {ratio}, from {min_size} on": functools.partial(
            limiters_limit, ratio, min_size
        )
        for ratio in (0.5, 1.0, 4.0)
        for min_size in (1, 10)
    },
    **{
        f"items of unrolls of {length}": functools.partial(
            items_end_with_episodes, length
        )
        for length in (1, 4, 13)
    },
    "all at once": bound_holds_for_all_at_once,
}


def main(argv: list[str]) -> None:
    del argv
    started_s = time.monotonic()
    failures = 0
    for name, law in LAWS.items():
        broken = list(itertools.islice(law(), 5))
        failures += bool(broken)
        for each in broken:
            print(f"{name}: {each}")
    seconds = time.monotonic() - started_s
    result = {"failures": failures, "laws": len(LAWS), "draws": _DRAWS.value}
    print(json.dumps(result | {"seconds": round(seconds, 1)}))


if __name__ == "__main__":
    app.run(main)
