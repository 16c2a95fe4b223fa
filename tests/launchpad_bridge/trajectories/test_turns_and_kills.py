"""Kill actors, table and learner at any moment: the batches are those of a calm run.

One thread steps all of them in an order that the seed decides, so each wait of the
table has to be seen before: `is_open` and `has_room` say when a call would not wait.
"""

import concurrent.futures
import hashlib
import random
import threading

import numpy as np
import pytest

from replicator.launchpad_bridge.trajectories.table import TableRestartedError
from replicator.launchpad_bridge.trajectories.trajectory_turns import TrajectoryTurns

SEEDS = range(150)
BATCHES = 9


def hashed(*values):
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:6], "big")


class Actor:
    """Its next trajectories follow from what it is, and from the variables."""

    def __init__(self, name, rows_per_turn):
        self.name = name
        self._rows_per_turn = rows_per_turn
        self._start()

    def _start(self):
        self.number, self.state, self.turn, self.sent = 0, 0, None, None

    def _obey(self, turn):
        if turn.number != self.number:
            # Only then: it must not matter whether it goes back to where it is.
            self.number, self.state = turn.number, 0
            if turn.snapshot is not None:
                self.state = int(turn.snapshot)
        self.turn = turn

    def step(self, table, variables, random_):
        """Do one thing: ask, act, or insert; a reply may be lost."""
        if self.turn is None:
            if table._progress is not None:
                self._obey(table.turn(self.name))
        elif self.sent is None:
            if self.turn.version in variables:
                self.state = hashed(self.name, self.state, variables[self.turn.version])
                ids = [self.state * 10 + k for k in range(self._rows_per_turn)]
                self.sent = {"reward": np.array(ids, np.float64)[:, None]}
        elif would_not_wait(table, self.name, self.number):
            told = table.insert(
                self.sent,
                actor=self.name,
                version=self.turn.version,
                number=self.number,
                snapshot=str(self.state).encode(),
                episodes=[float(self.number)],
            )
            if random_.random() < 0.1:
                return  # the reply was lost: it inserts the same again
            self.sent, self.number = None, self.number + 1
            self._obey(told)

    def killed(self):
        self._start()


def would_not_wait(table, actor, number):
    now = table._progress
    if now is None:
        return False
    turn = table._order.turn_of(actor, number)
    return number != now.next_of[actor] or turn < now.end_turn


class Learner:
    """Its next variables follow from its variables and the batch."""

    def __init__(self, table):
        self.saved = (0, {0: 0}, None, [])
        self.restore(table)

    def restore(self, table):
        """Go back to what was saved."""
        self.updates, variables, self.cut, batches = self.saved
        self.variables, self.batches = dict(variables), list(batches)
        table.begin(self.cut)

    def save(self):
        self.saved = (
            self.updates,
            dict(self.variables),
            self.cut,
            list(self.batches),
        )

    def step(self, table):
        try:
            taken = table.take(table._order.batch_size, timeout_s=0)
        except TableRestartedError:
            table.begin(self.cut)
            return
        if taken is None:
            return
        ids = taken.trajectories["reward"][:, 0].tolist()
        self.batches.append((ids, taken.versions.tolist(), list(taken.episodes)))
        self.cut = taken.cut
        assert self.cut.batch == self.updates + 1
        previous = self.variables[self.updates]
        self.updates += 1
        self.variables[self.updates] = hashed(previous, ids)


def run(seed, *, kills):
    """Run a program of a shape that the seed decides; return its batches."""
    shape, random_ = random.Random(seed), random.Random(seed + 1)
    names = [f"actor/{k}" for k in range(shape.randint(1, 4))]
    rows = shape.randint(1, 3)
    options = {
        "batch_size": rows * shape.randint(1, 5),
        "rows_per_turn": rows,
        "lag": shape.randint(0, 3),
    }
    table = TrajectoryTurns(names, **options)
    actors = [Actor(name, rows) for name in names]
    learner = Learner(table)
    while len(learner.batches) < BATCHES:
        what = random_.random()
        if kills and what < 0.01:
            table = TrajectoryTurns(names, **options)
        elif kills and what < 0.02:
            learner.restore(table)
        elif kills and what < 0.04:
            random_.choice(actors).killed()
        elif what < 0.2:
            learner.step(table)
        elif what < 0.25:
            learner.save()
        else:
            random_.choice(actors).step(table, learner.variables, random_)
    return learner.batches, options["lag"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_with_kills_has_the_batches_of_one_without(seed):
    calm, lag = run(seed, kills=False)
    assert run(seed, kills=True) == (calm, lag)
    for batch, (_, versions, _) in enumerate(calm):
        assert set(versions) == {max(0, batch - lag)}


def act(table, actor, is_over):
    """Do the turns that the table asks for, in a thread."""
    turn = table.turn(actor)
    while not is_over.is_set():
        value = 100 * turn.number + int(actor)
        turn = table.insert(
            {"reward": np.full((1, 1), value, np.float64)},
            actor=actor,
            version=turn.version,
            number=turn.number,
            snapshot=str(value).encode(),
        )


@pytest.mark.parametrize("seed", range(5))
def test_a_learner_may_go_back_at_any_moment_while_threads_insert(seed):
    random_, names, is_over = random.Random(seed), ["0", "1", "2"], threading.Event()
    table = TrajectoryTurns(names, batch_size=2, rows_per_turn=1, lag=100)
    cuts, found = [None], []
    table.begin(None)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        acting = [pool.submit(act, table, name, is_over) for name in names]
        while len(found) < 90:
            taken = table.take(2, timeout_s=60)
            found += taken.trajectories["reward"][:, 0].tolist()
            cuts.append(taken.cut)
            if random_.random() < 0.3:
                batch = random_.randrange(max(0, len(cuts) - 5), len(cuts))
                del cuts[batch + 1 :], found[2 * batch :]
                table.begin(cuts[-1])
        is_over.set()
        table.begin(None)  # lets those go that wait for room
        for each in acting:
            each.result(60)
    assert found == [100 * (turn // 3) + turn % 3 for turn in range(90)]
    for batch, cut in enumerate(cuts[1:], start=1):
        assert cut.batch == batch
