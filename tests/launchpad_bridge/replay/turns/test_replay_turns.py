"""A replay table of turns gives the same samples, whoever of its run is killed."""

import json
import threading
from typing import NamedTuple

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator import rpc
from replicator.errors import ArgumentError, CheckpointInUseError
from replicator.launchpad_bridge.trajectories.table import (
    Cut,
    TableRestartedError,
    TrajectoryError,
)

ACTORS, SIZE, NEW, LAG, PRIORITY_LAG = ["a", "b"], 6, 2, 1, 2
FIRST = 3  # batches of new rows before the first batch
BATCHES = 10
SOON_S = 60.0
OPTIONS = {
    "actors": ACTORS,
    "batch_size": SIZE,
    "new_rows_per_batch": NEW,
    "rows_per_turn": 1,
    "lag": LAG,
    "capacity": 8,
    "min_size": 5,
    "sampler": lp.prioritised(0.8),
    "priority_lag": PRIORITY_LAG,
}


class Reward(NamedTuple):
    reward: np.ndarray


class Program:
    """Actors, a table, and a learner that has its own checkpoints: the cuts."""

    def __init__(self, folder, **options):
        self._options = OPTIONS | options | {"checkpoint_dir": folder / "replay"}
        self.cuts = {0: None}
        self.batch = 0
        self.table = lp.ReplayTurns(**self._options)
        self.table.begin(None)

    def restart_table(self):
        self.table._close()
        self.table = lp.ReplayTurns(**self._options)

    def go_on(self, batch):
        """Begin at a batch, as a learner does that has its checkpoint."""
        self.batch, cut = batch, self.cuts[batch]
        # Cuts travel in checkpoints.
        self.table.begin(cut and Cut.from_json(cut.to_json()))
        for earlier in range(max(batch - PRIORITY_LAG, 0), batch):
            self.send(earlier)

    def send(self, batch):
        keys = batch * SIZE + np.arange(SIZE)
        values = (keys % 5 + 1.0) ** 2
        values[batch % SIZE] = np.nan
        self.table.update_priorities(keys, values)

    def act(self):
        """Insert one turn of each actor that has its variables."""
        for actor in ACTORS:
            turn = self.table.turn(actor)
            if turn.version <= self.batch:
                number = turn.number
                state = b"start" if turn.snapshot is None else turn.snapshot
                assert state == (b"start" if number == 0 else b"%d" % (number - 1))
                ids = np.array([10 * number + ACTORS.index(actor)])
                self.table.insert(
                    {"id": ids, "reward": np.float32(ids)},
                    actor=actor,
                    version=turn.version,
                    number=number,
                    snapshot=b"%d" % number,
                    episodes=[float(number)],
                )

    def take(self):
        while (taken := self.table.take(SIZE, timeout_s=0)) is None:
            self.act()
        self.batch += 1
        assert taken.cut.batch == self.batch
        self.cuts[self.batch] = taken.cut
        self.send(self.batch - 1)
        return {
            "id": taken.trajectories["id"].tolist(),
            "version": taken.versions.tolist(),
            "probability": taken.probabilities.tolist(),
            "key": taken.keys.tolist(),
            "episodes": list(taken.episodes),
        }

    def take_to_the_end(self):
        return [self.take() for _ in range(self.batch, BATCHES)]


@pytest.fixture
def start(tmp_path):
    programs = []

    def start(name="run", **options):
        programs.append(Program(tmp_path / name, **options))
        return programs[-1]

    yield start
    for program in programs:
        program.table._close()


@pytest.fixture(params=["prioritised", "uniform"])
def whole(request, start):
    """Return options of a table, and the batches of a run in which nobody died."""
    sampler = {"prioritised": lp.prioritised(0.8), "uniform": lp.uniform()}
    options = {"sampler": sampler[request.param]}
    return options, start("whole", **options).take_to_the_end()


def test_a_second_run_has_the_same_batches(start, whole):
    options, batches = whole
    assert start(**options).take_to_the_end() == batches
    assert start("other", **options, seed=1).take_to_the_end() != batches


def test_a_table_that_was_killed_goes_on_with_the_same(start, whole):
    options, batches = whole
    program, found = start(**options), []
    while program.batch < BATCHES:
        found.append(program.take())
        program.act()  # what is held is lost, and made again
        program.restart_table()
        with pytest.raises(TableRestartedError):
            program.table.take(SIZE, timeout_s=0)
        program.go_on(program.batch)
    assert found == batches


@pytest.mark.parametrize("restarts", [False, True])
def test_a_learner_that_goes_back_gets_the_same_again(start, whole, restarts):
    options, batches = whole
    program = start(**options)
    program.take_to_the_end()
    for batch in (7, 7, 8, 2, 0):
        if restarts:
            program.restart_table()
        program.go_on(batch)
        assert [program.take() for _ in range(2)] == batches[batch : batch + 2]


def test_a_learner_that_began_twice_gets_the_same(start, whole):
    options, batches = whole
    program = start(**options)
    found = []
    while program.batch < BATCHES:
        program.go_on(program.batch)
        found.append(program.take())
        program.go_on(program.batch)
    assert found == batches


def test_new_rows_are_acted_with_the_version_of_the_fixed_lag(start):
    program = start(sampler=lp.uniform(), batch_size=64, capacity=1000)
    program.send = lambda batch: None
    for batch in range(6):
        taken = program.table.take(64, timeout_s=0)
        while taken is None:
            program.act()
            taken = program.table.take(64, timeout_s=0)
        program.batch += 1
        assert taken.versions.max() == max(0, batch - LAG)
        rows = (FIRST + batch) * NEW
        assert set(taken.probabilities.tolist()) == {1 / rows}
        assert program.table.statistics()["inserted"] == rows


def test_actors_are_ahead_by_no_more_than_the_lag_allows(start):
    program = start(min_size=8)
    assert program.table.statistics()["turns"]["capacity"] == (LAG + 2) * NEW


def test_a_batch_waits_for_the_priorities_of_one_before_it_and_names_it(start):
    program = start()
    program.send = lambda batch: None
    for _ in range(PRIORITY_LAG):
        program.take()
    for _ in range(2):
        program.act()
    assert program.table.take(SIZE, timeout_s=0.01) is None
    waits_for = program.table.statistics()["waits_for"]
    assert waits_for == "the priorities of batch 0"
    taken = []
    thread = threading.Thread(
        target=lambda: taken.append(program.table.take(SIZE, timeout_s=SOON_S))
    )
    thread.start()
    program.table.update_priorities(np.arange(SIZE), np.ones(SIZE))
    thread.join(SOON_S)
    assert taken[0].cut.batch == PRIORITY_LAG + 1


def test_begin_ends_a_call_that_waits(start):
    program = start()
    errors = []

    def take():
        try:
            program.table.take(SIZE, timeout_s=SOON_S)
        except TableRestartedError as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    while thread.is_alive():
        program.table.begin(None)
        thread.join(0.01)
    assert errors


def test_a_call_of_begin_that_nobody_waits_for_any_more_changes_nothing(
    start, monkeypatch
):
    program = start()
    program.take()
    with monkeypatch.context() as patch:
        patch.setattr(rpc, "cancelled", lambda: True)
        program.table.begin(None)
    assert program.take()["key"][0] == SIZE


def test_counts_of_a_run_go_on_over_kills(start):
    one, other = start("one"), start("other")
    one.take_to_the_end()
    for _ in range(BATCHES):
        other.take()
        other.restart_table()
        other.go_on(other.batch)
    names = ("inserted", "held", "taken", "updated", "late", "dropped")
    counts = [one.table.statistics(), other.table.statistics()]
    assert [counts[0][name] for name in names] == [counts[1][name] for name in names]
    assert counts[0]["inserted"] == (FIRST + BATCHES - 1) * NEW
    assert counts[0]["late"] > 0


def test_rows_of_another_form_than_those_before_are_refused_by_actor(start):
    program = start()
    program.take()
    program.restart_table()
    program.go_on(1)
    both = "of a must have the form of those in .*'reward'.* in .*, got {'other'"
    with pytest.raises(TrajectoryError, match=both):
        program.table.insert({"other": np.ones(1)}, actor="a", version=0, number=3)


def test_rows_that_no_journal_can_hold_are_refused_before_the_first_is_in(start):
    program = start()
    with pytest.raises(TrajectoryError, match="Reward, which is not registered"):
        program.table.insert(Reward(np.ones(1)), actor="a", version=0, number=0)
    assert program.take()["key"][0] == 0


def test_an_insert_of_another_number_of_rows_is_refused_by_name(start):
    program = start()
    program.take()
    turn, rows = program.table.turn("a"), {"id": np.arange(2), "reward": np.ones(2)}
    rows["reward"] = rows["reward"].astype(np.float32)
    with pytest.raises(TrajectoryError, match="got 1, and 2 trajectories of a") as why:
        program.table.insert(rows, actor="a", version=0, number=turn.number)
    assert "Use 2; where it varies, as that of `items` does" in str(why.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": lp.fifo()}, "`sampler` must be one that `lp.uniform` or"),
        ({"capacity": 5}, "`capacity` must be at least 6, the rows before the first"),
        ({"rows_per_turn": 3}, "`new_rows_per_batch` must be a multiple of"),
        ({"priority_lag": 0}, "`priority_lag` must be"),
        ({"batch_size": 0}, "`batch_size` must be"),
        ({"lag": -1}, "`lag` must be"),
        ({"actors": ["a", "a"]}, "`actors` must differ"),
    ],
)
def test_options_of_which_no_table_can_be_made_are_refused(start, options, message):
    with pytest.raises(ArgumentError, match=message):
        start(**options)


def test_numbers_of_numpy_are_as_those_of_python(start):
    names = [name for name, value in OPTIONS.items() if isinstance(value, int)]
    options = {name: np.int64(OPTIONS[name]) for name in names}
    program = start(**options, seed=np.int64(0))
    found = program.take()
    order = json.loads(json.dumps(program.cuts[1].to_json()))["order"]
    assert order["capacity"] == OPTIONS["capacity"]
    json.dumps(program.table.statistics())
    assert start("python").take() == found


def test_a_table_without_a_directory_is_refused():
    with pytest.raises(ArgumentError, match="`checkpoint_dir` must be a directory"):
        lp.ReplayTurns(**OPTIONS, checkpoint_dir=None)


def test_a_second_table_in_the_directory_is_refused(start):
    start()
    with pytest.raises(CheckpointInUseError):
        start()


def test_cuts_of_other_settings_another_run_or_a_batch_not_there_are_refused(start):
    one, other = start("one"), start("other", seed=3)
    for program in (one, other):
        program.take_to_the_end()
    with pytest.raises(ArgumentError, match="settings, got one of other seed"):
        one.table.begin(other.cuts[3])
    third = start("third")
    with pytest.raises(ArgumentError, match="must be of a batch in `checkpoint_dir`"):
        third.table.begin(one.cuts[3])
    third.table.begin(None)
    third.take_to_the_end()
    with pytest.raises(ArgumentError, match="must be of the run in `checkpoint_dir`"):
        third.table.begin(one.cuts[3])


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ([0], [-1.0], "`values` must be at least 0, got -1.0"),
        ([0, 1], [1.0], "`values` must have one for each key, got 1 for 2"),
        ([99], [1.0], "`keys` must be keys that this table gave, got 99"),
    ],
)
def test_priorities_that_can_mean_nothing_are_refused(start, keys, values, message):
    program = start()
    program.take()
    with pytest.raises(ArgumentError, match=message):
        program.table.update_priorities(np.array(keys), np.array(values))


def test_another_count_than_the_batch_is_refused(start):
    with pytest.raises(ArgumentError, match="`count` must be `batch_size`, got 7"):
        start().table.take(7, timeout_s=0)
