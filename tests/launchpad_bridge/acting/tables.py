"""The smallest learner that is a table too, without an order and with one."""

import collections
import dataclasses
import threading

import jax
import numpy as np

import replicator.launchpad_bridge as lp
from replicator.launchpad_bridge.trajectories.table import ActorTurn, TrajectoryError
from tests.launchpad_bridge.acting.counter import published


class Killed(BaseException):
    """In place of SIGKILL: nobody handles it."""


class FreeTable:
    """Takes all; has a new version after each insert."""

    def __init__(self, refuse=()):
        self.inserted = []
        self.refuse = set(refuse)
        self.calls = 0
        self.lock = threading.Lock()

    def insert(self, trajectories, *, actor, version, number, snapshot, episodes):
        assert number is None
        assert snapshot is None
        with self.lock:
            self.calls += 1
            if self.calls - 1 in self.refuse:
                raise TrajectoryError(f"`{actor}` sent something else")
            copied = jax.tree.map(np.copy, trajectories)
            self.inserted.append((actor, version, copied, list(episodes)))
        return ActorTurn()

    def get_variables(self, *, newer_than=None, timeout_s):
        version = len(self.inserted)
        return None if version == newer_than else published(version)


class LaterTable(FreeTable):
    """Of a learner that went on from its checkpoint: its first version is another."""

    def __init__(self, version):
        super().__init__()
        self.version = version

    def get_variables(self, *, newer_than=None, timeout_s):
        return None if self.version == newer_than else published(self.version)


class TurnTable:
    """Takes the turns of one actor in order; can lose its last ones, and kill."""

    def __init__(self, lag=1, rows=7):
        self.turns, self.snapshots, self.episodes = [], [None], []
        self.lag, self.rows = lag, rows  # these count for actors with `items` alone
        self.before = self.after = lambda number: None

    def turn(self, actor):
        number = len(self.turns)
        return ActorTurn(
            number=number,
            version=max(0, number - self.lag),
            snapshot=self.snapshots[number],
            rows_per_turn=self.rows,
        )

    def insert(self, trajectories, *, actor, version, number, snapshot, episodes):
        self.before(number)
        if number != len(self.turns):
            return self.turn(actor)
        assert version == max(0, number - self.lag)
        self.turns.append(jax.tree.map(np.copy, trajectories))
        self.snapshots.append(snapshot)
        self.episodes.append(list(episodes))
        self.after(number)
        turn = self.turn(actor)
        return dataclasses.replace(turn, snapshot=None)

    def forget(self, turns):
        """Go back by so many turns, as a learner to its checkpoint."""
        del self.turns[-turns:], self.snapshots[-turns:], self.episodes[-turns:]

    def get_variables(self, *, version, timeout_s):
        assert timeout_s > 0
        return published(version)


class LearnerNode(FreeTable):
    """Stops its program when it has so many inserts, of two actors and versions."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def insert(self, *args, **kwargs):
        turn = super().insert(*args, **kwargs)
        counts = collections.Counter(actor for actor, *_ in self.inserted)
        is_newer = any(version for _, version, *_ in self.inserted)
        if len(self.inserted) >= self.number and len(counts) == 2 and is_newer:
            lp.stop()
        return turn

    def run(self):
        lp.wait_for_stop()
        actors, versions, *_ = zip(*self.inserted, strict=True)
        return set(actors), versions
