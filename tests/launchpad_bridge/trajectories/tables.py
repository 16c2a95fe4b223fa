"""All tables, and what the tests put into them."""

import functools
import threading

import numpy as np

import replicator.launchpad_bridge as lp
from replicator.launchpad_bridge.trajectories.trajectory_queue import TrajectoryQueue
from replicator.launchpad_bridge.trajectories.trajectory_turns import TrajectoryTurns

ACTORS = ["actor/0", "actor/1", "actor/2"]
SOON_S = 60.0


def rows(*ids, steps=3, reward=0.5):
    """Return one trajectory for each id, which is in all of its leaves."""
    ids = np.array(ids, np.int64)
    pixels = np.broadcast_to(ids.astype(np.uint8)[:, None, None], (len(ids), steps, 4))
    return {
        "observation": {"pixels": pixels.copy(), "id": ids},
        "reward": np.full((len(ids), steps), reward, np.float32),
        "core": (),
    }


def ids_of(taken):
    """Return the ids of a batch, once each of its rows is seen to be whole."""
    observation = taken.trajectories["observation"]
    whole = observation["pixels"] == observation["id"].astype(np.uint8)[:, None, None]
    assert whole.all()
    return observation["id"].tolist()


class FreeDriver:
    """Inserts into a queue as actors do; two trajectories at once."""

    make_table, capacity = TrajectoryQueue, 64

    def __init__(self, **options):
        self.table = self.make_table(**{"capacity": self.capacity} | options)
        self._lock = threading.Lock()
        self._next = {}

    def insert(self, actor="actor/0", **changes):
        """Insert the next two trajectories of an actor; return their ids."""
        with self._lock:
            number = self._next.get(actor, 0)
            self._next[actor] = number + 1
        ids = ids_at(actor, number)
        arguments = {"trajectories": rows(*ids), "actor": actor, "version": 0}
        self.table.insert(**arguments | changes)
        return ids


class ReplayDriver(FreeDriver):
    """Inserts into a replay table that gives each row out once, oldest first."""

    capacity = 1024  # it never blocks
    make_table = staticmethod(
        functools.partial(lp.ReplayTable, sampler=lp.fifo(), max_times_sampled=1)
    )


class TurnsDriver:
    """Inserts into turns as actors do."""

    def __init__(self, batch_size=6, lag=1, **options):
        self.table = self.make_table(batch_size=batch_size, lag=lag, **options)
        self.table.begin(None)

    def make_table(self, **options):
        return TrajectoryTurns(ACTORS, rows_per_turn=2, **options)

    def insert(self, actor="actor/0", **changes):
        """Insert the next turn of an actor; return the ids of its trajectories."""
        turn = self.table.turn(actor)
        ids = ids_at(actor, turn.number)
        arguments = {
            "trajectories": rows(*ids),
            "actor": actor,
            "version": turn.version,
            "number": turn.number,
        }
        self.table.insert(**arguments | changes)
        return ids


class ReplayTurnsDriver(TurnsDriver):
    """Inserts into a replay table of turns, all of whose rows are likely drawn."""

    def make_table(self, batch_size, **options):
        return lp.ReplayTurns(
            ACTORS,
            **{"batch_size": batch_size, "new_rows_per_batch": batch_size},
            **{"rows_per_turn": 2, "capacity": 64, **options},
        )

    def close(self):
        self.table._close()


def ids_at(actor, number):
    """Return the ids of the two trajectories of an actor's turn."""
    first = 1000 * ACTORS.index(actor) + 2 * number
    return [first, first + 1]


def left_in(table):
    """Return the number of rows that wait to be taken."""
    counts = table.statistics()
    return counts["held"] if "held" in counts else counts["waiting"]
