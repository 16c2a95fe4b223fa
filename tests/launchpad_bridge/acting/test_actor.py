"""Actors outlive whom they depend on; in turns they end with the same bits."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator import rpc
from replicator.errors import (
    ArgumentError,
    CallTimeoutError,
    CheckpointMismatchError,
    ConnectionLostError,
)
from replicator.launchpad_bridge.acting import (
    Actor,
    EnvironmentFailedError,
    InferenceServer,
    LocalInference,
    environment_seed,
    from_gymnasium_envs,
    n_step,
    start,
    unroll,
)
from replicator.launchpad_bridge.trajectories.table import (
    ActorTurn,
    TableTimeoutError,
    TrajectoryError,
)
from tests.launchpad_bridge.acting.counter import (
    Counter,
    GoesBack,
    initial_core,
    keyed_policy,
    policy,
    variables_of,
)
from tests.launchpad_bridge.acting.tables import (
    FreeTable,
    Killed,
    LaterTable,
    LearnerNode,
    TurnTable,
)
from tests.launchpad_bridge.acting.test_environments import equal

SIZE, LENGTH, TURNS = 2, 5, 9


class Enough(Exception):
    """Ends an actor that would go on."""


def make(index):
    return from_gymnasium_envs([GoesBack] * SIZE)


def make_actor(table, *, make=make, **options):
    options = {"index": 3, "unroll_length": LENGTH, "seed": 1, **options}
    return Actor(make, policy, initial_core, table, **options)


def turning(table, **options):
    return make_actor(table, is_deterministic=True, **options)


def stop_after(turns):
    def stop(number):
        if number + 1 == turns:
            raise Enough

    return stop


def run_turns(table, turns=TURNS, **options):
    table.after = stop_after(turns)
    with pytest.raises(Enough):
        turning(table, **options).run()
    return table


WAYS = pytest.mark.parametrize(
    "options",
    [{}, {"one_episode_per_trajectory": True}, {"items": n_step(3, discount=0.9)}],
    ids=["goes on", "begins anew", "items"],
)


def test_trajectories_are_those_of_unrolls_without_a_program():
    turns = run_turns(TurnTable()).turns
    environment, act = make(3), LocalInference(policy, seed=1, index=3)
    seed = environment_seed(1, 3)
    acting = start(environment, initial_core, seed=seed)
    for number, turn in enumerate(turns):
        act.use(variables_of(max(0, number - 1)))
        unrolled = unroll(environment, act, acting, LENGTH)
        assert equal(unrolled.trajectories, turn)
        acting = unrolled.acting


def test_turns_have_the_rows_that_their_table_asks_for_each_item_once():
    items = n_step(3, discount=0.9)
    turns = run_turns(TurnTable(lag=TURNS), items=items).turns
    assert {len(turn["reward"]) for turn in turns} == {7}
    environment, act = make(3), LocalInference(policy, seed=1, index=3)
    acting = start(environment, initial_core, seed=environment_seed(1, 3))
    act.use(variables_of(0))
    made, waiting = [], None
    while sum(len(rows["reward"]) for rows in made) < 7 * TURNS:
        unrolled = unroll(environment, act, acting, LENGTH)
        rows, waiting = items(unrolled.trajectories, waiting, ends=False)
        made.append(rows)
        acting = unrolled.acting
    assert len({len(rows["reward"]) for rows in made}) > 1
    whole = jax.tree.map(lambda *parts: np.concatenate(parts)[: 7 * TURNS], *made)
    assert equal(jax.tree.map(lambda *parts: np.concatenate(parts), *turns), whole)


@WAYS
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("killed_at", range(TURNS - 1))
def test_a_killed_actor_goes_on_with_the_same_bits(when, killed_at, options):
    undisturbed = run_turns(TurnTable(), **options)
    table = TurnTable()

    def kill(number):
        if number == killed_at:
            raise Killed

    setattr(table, when, kill)
    with pytest.raises(Killed):
        turning(table, **options).run()
    table.before = lambda number: None
    run_turns(table, **options)
    assert equal(table.turns, undisturbed.turns)
    assert table.snapshots == undisturbed.snapshots
    assert table.episodes == undisturbed.episodes


@WAYS
@pytest.mark.parametrize("forgotten", [1, 2, 6])
def test_an_actor_goes_back_with_a_table_that_does(forgotten, options):
    undisturbed = run_turns(TurnTable(), **options)
    table = TurnTable()

    def forget(number):
        if number == 6:
            table.before = lambda number: None
            table.forget(forgotten)

    table.before = forget
    table.after = stop_after(TURNS)
    actor = turning(table, **options)
    with pytest.raises(Enough):
        actor.run()
    assert equal(table.turns, undisturbed.turns)
    assert table.snapshots == undisturbed.snapshots
    assert actor.statistics()["restored"] == 1


def test_a_turn_whose_answer_was_lost_is_inserted_once():
    undisturbed, table = run_turns(TurnTable()), TurnTable()

    def lose(number):
        if number == 2:
            table.after = stop_after(TURNS)
            raise ConnectionLostError("gone")

    table.after = lose
    actor = turning(table)
    with pytest.raises(Enough):
        actor.run()
    assert equal(table.turns, undisturbed.turns)
    assert actor.statistics()["waits"] == 1


def test_a_turn_that_changes_while_its_variables_are_awaited_is_left():
    class GoesBackOnce(TurnTable):
        asked = 0

        def get_variables(self, *, version, timeout_s):
            if version == 4:
                self.asked += 1
                if self.asked == 1:
                    self.forget(3)  # nobody will publish version 4 before that again
                    return None
            return super().get_variables(version=version, timeout_s=timeout_s)

    table = run_turns(GoesBackOnce())
    assert equal(table.turns, run_turns(TurnTable()).turns)
    assert table.asked == 2


def test_variables_that_nobody_keeps_are_an_error_where_the_turn_stays():
    class Forgetful(TurnTable):
        def get_variables(self, *, version, timeout_s):
            raise ArgumentError("not kept")

    with pytest.raises(ArgumentError, match="not kept"):
        turning(Forgetful()).run()


class Queue(FreeTable):
    """A learner whose table is a queue."""

    def __init__(self):
        super().__init__()
        self.queue = lp.TrajectoryQueue(64)

    def insert(self, trajectories, **options):
        return self.queue.insert(trajectories, **options)


def test_a_core_without_a_row_of_each_environment_is_refused_by_the_table():
    def layered(variables, observation, first, core, key):
        return jnp.zeros(len(first), jnp.int32), {}, core

    learner = Queue()
    counts = Actor(
        make,
        layered,
        lambda n: np.zeros((SIZE + 1, n, 3), np.float32),
        learner,
        index=0,
        unroll_length=LENGTH,
        episodes=2,
    ).run()
    assert counts["refused"] > 0
    assert learner.queue.statistics()["inserted"] == 0


def test_a_turn_without_its_snapshot_is_refused():
    table = TurnTable()
    table.turns, table.snapshots = [None] * 3, [None] * 4
    with pytest.raises(
        CheckpointMismatchError, match="`turn` 3 of 'actor/3' must come"
    ):
        turning(table).run()


def test_turns_need_environments_that_go_back():
    def make(index):
        return from_gymnasium_envs([Counter])

    with pytest.raises(ArgumentError, match="pass `one_episode_per_trajectory=True`"):
        turning(TurnTable(), make=make)
    turning(TurnTable(), make=make, one_episode_per_trajectory=True)


def test_turns_need_a_table_that_gives_them():
    class Free(FreeTable):
        def turn(self, actor):
            return ActorTurn()

    with pytest.raises(ArgumentError, match="Use `TrajectoryTurns`"):
        turning(Free()).run()


def test_turns_and_a_central_inference_are_refused():
    with pytest.raises(ArgumentError, match="`inference` must be None with"):
        turning(TurnTable(), inference=object())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"index": -1}, "`index` must be at least 0, got -1"),
        ({"seed": 0.5}, "`seed` must be a whole number, got 0.5"),
        ({"unroll_length": 0}, "`unroll_length` must be at least 1, got 0"),
        ({"episodes": 0}, "`episodes` must be at least 1, got 0"),
        ({"is_deterministic": True, "episodes": 3}, "`episodes` must be None with"),
        ({"is_deterministic": "yes"}, "`is_deterministic` must be True or False"),
    ],
)
def test_arguments_are_checked_before_environments_are_made(options, said):
    with pytest.raises(ArgumentError, match=said):
        make_actor(FreeTable(), make=None, **options)


def keyed(table, **options):
    """Run an actor; return what it saw first, and by which keys it acted then."""
    options = {"index": 3, "unroll_length": 20, "episodes": 1, **options}
    Actor(make, keyed_policy, initial_core, table, **options).run()
    first = table.inserted[0][2]
    return first["observation"], first["extras"]["key"]


def test_a_second_start_in_free_mode_sees_other_episodes_by_other_keys():
    found = []

    def act():
        found.append(keyed(FreeTable()))
        if lp.context.get_context().attempt == 0:
            raise OSError("once")

    program = lp.Program("restarts")
    with program.group("actors", restart=lp.Restart(attempts=1, backoff_s=0.01)):
        program.add_node(lp.PyNode(act))
    with lp.launch(program, "threads") as run:
        run.wait(60)
    assert_apart(*found)


def assert_apart(one, other):
    assert not equal(one[0], other[0])
    assert not set(map(tuple, one[1][0])) & set(map(tuple, other[1][0]))


def central(version):
    server = InferenceServer(keyed_policy, LaterTable(version), timeout_s=0.0)
    server.refresh()
    return {"inference": server}


@pytest.mark.parametrize("options", [lambda version: {}, central])
def test_a_free_actor_of_a_learner_that_went_on_sees_other_episodes_by_other_keys(
    options,
):
    one, again, later = (keyed(LaterTable(v), **options(v)) for v in (4, 4, 8))
    assert equal(one, again)
    assert_apart(one, later)


def test_free_actors_with_one_index_see_other_episodes_by_other_keys():
    assert_apart(*(keyed(FreeTable(), name=name) for name in ("actor/0", "actor/1")))


def test_an_actor_that_starts_from_a_snapshot_counts_that():
    table = TurnTable()
    table.after = stop_after(3)
    first = turning(table)
    with pytest.raises(Enough):
        first.run()
    table.after = stop_after(5)
    second = turning(table)
    with pytest.raises(Enough):
        second.run()
    assert first.statistics()["restored"] == 0
    assert second.statistics()["restored"] == 1


def test_a_turn_that_is_refused_ends_the_actor():
    def refuse(number):
        raise TrajectoryError("another form")

    table = TurnTable()
    table.before = refuse
    with pytest.raises(TrajectoryError):
        turning(table).run()


def test_a_free_actor_takes_the_newest_variables_and_counts():
    table = FreeTable()
    counts = make_actor(table, episodes=12).run()
    versions = [version for _, version, _, _ in table.inserted]
    assert versions == list(range(len(versions)))
    assert sum(len(episodes) for *_, episodes in table.inserted) >= 12
    assert counts["trajectories"] == SIZE * len(versions)
    assert counts["steps"] == SIZE * LENGTH * len(versions)
    assert counts["version"] == versions[-1]


def test_consecutive_trajectories_of_a_free_actor_overlap_by_an_observation():
    table = FreeTable()
    make_actor(table, episodes=12).run()
    inserted = [trajectories for _, _, trajectories, _ in table.inserted]
    for one, other in itertools.pairwise(inserted):
        for name in ("place", "count"):
            ends, begins = one["observation"][name], other["observation"][name]
            assert equal(ends[:, -1], begins[:, 0])


def test_a_refused_trajectory_is_counted_and_logged_and_the_actor_goes_on(caplog):
    table = FreeTable(refuse=[1, 2, 3])
    counts = make_actor(table, episodes=24).run()
    assert counts["refused"] == 3 * SIZE
    assert len(table.inserted) > 3
    assert [r.message for r in caplog.records if "were refused" in r.message] == [
        f"actor/3: trajectories were refused ({times} times by now): "
        "`actor/3` sent something else"
        for times in (1, 2)
    ]


def test_an_environment_that_changes_its_observation_names_its_actor():
    class Changing(GoesBack):
        def _observation(self):
            seen = super()._observation()
            return {**seen, "count": float(seen["count"])} if self._count == 2 else seen

    def make(index):
        return from_gymnasium_envs([Changing])

    expected = "`actor/3`: .* after 1 steps: `observation/count` is float64"
    with pytest.raises(EnvironmentFailedError, match=expected):
        make_actor(FreeTable(), make=make).run()


def test_an_environment_that_fails_names_its_actor():
    class Failing(GoesBack):
        def step(self, action):
            raise OSError("no more")

    def make(index):
        return from_gymnasium_envs([Failing])

    expected = "`actor/3`: `environment.step` must not raise, got OSError after 0 steps"
    with pytest.raises(EnvironmentFailedError, match=expected):
        make_actor(FreeTable(), make=make).run()


class Hanging(FreeTable):
    """Gives no variables after its sixth insert."""

    def __init__(self):
        super().__init__()
        self.hangs, self.over = threading.Event(), threading.Event()

    def get_variables(self, *, newer_than=None, timeout_s):
        if len(self.inserted) == 6:
            self.hangs.set()
            self.over.wait()
        return super().get_variables(newer_than=newer_than, timeout_s=timeout_s)


def test_an_actor_waits_for_a_learner_that_starts_again(caplog, tmp_path):
    first, second = Hanging(), FreeTable()
    server = rpc.Server(first, address=f"unix:{tmp_path}/learner")
    server.start()
    with rpc.Client(server.address, wait_for_ready=False) as client:
        actor = make_actor(client, episodes=60)
        thread = threading.Thread(target=actor.run)
        thread.start()
        first.hangs.wait()
        server.stop(drain_s=0.01)
        with rpc.Server(second, address=server.address):
            thread.join()
        first.over.set()
    assert len(first.inserted) == 6
    assert second.inserted
    assert actor.statistics()["waits"] == 1
    assert "actor/3 waits for variables: " in caplog.text
    assert "for variables and goes on" in caplog.text


def test_what_was_on_its_way_to_a_table_that_died_is_lost_and_counted():
    class Dies(FreeTable):
        def insert(self, *args, **kwargs):
            if self.calls == 2:
                self.calls += 1
                raise ConnectionLostError("gone")
            return super().insert(*args, **kwargs)

    table = Dies()
    counts = make_actor(table, episodes=12).run()
    assert counts["lost"] == SIZE
    assert counts["steps"] == LENGTH * (counts["trajectories"] + SIZE)


def test_an_insert_that_found_no_room_in_time_is_made_again():
    class Full(FreeTable):
        is_full = True

        def insert(self, *args, **kwargs):
            if self.is_full:
                self.is_full = False
                raise TableTimeoutError("no room")
            return super().insert(*args, **kwargs)

    counts = make_actor(Full(), episodes=12).run()
    assert counts["lost"] == 0
    assert counts["waits"] == 1


def test_an_insert_that_was_late_only_is_not_made_again():
    class Late(FreeTable):
        is_late = True

        def insert(self, *args, **kwargs):
            turn = super().insert(*args, **kwargs)
            if self.is_late:
                self.is_late = False
                raise CallTimeoutError("it had run by then")
            return turn

    table = Late()
    counts = make_actor(table, episodes=12).run()
    assert counts["lost"] == SIZE
    assert SIZE * len(table.inserted) == counts["trajectories"] + SIZE


class Stopping(GoesBack):
    """Stops its program at its third step."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            lp.stop()
            lp.wait_for_stop()
        return super().step(action)


def test_an_actor_stops_within_a_step():
    made = []

    def make(index):
        made.append(Stopping())
        return from_gymnasium_envs([lambda: made[0]])

    def act():
        return make_actor(FreeTable(), make=make, unroll_length=1000).run()

    with lp.launch(lp.make_program(lp.PyNode(act)), "threads") as run:
        run.wait(60)
    assert run.results["node0"]["trajectories"] == 0


def test_actors_of_a_program_bear_their_workers_names():
    program = lp.Program("acting")
    learner = program.add_node(lp.CourierNode(LearnerNode, 8), label="learner")
    with program.group("actors"):
        for index in range(2):
            node = lp.PyClassNode(
                Actor,
                make,
                policy,
                initial_core,
                learner,
                index=index,
                unroll_length=LENGTH,
            )
            program.add_node(node)
    with lp.launch(program, "threads") as run:
        run.wait(60)
    names, versions = run.results["learner"]
    assert names == {"actors/0", "actors/1"}
    assert max(versions) > 0
    assert run.results["actors/0"]["refused"] == 0


class Unpublished(FreeTable):
    """Has no variables; stops its program when it is asked for them."""

    def get_variables(self, *, newer_than=None, timeout_s):
        lp.stop()


def test_an_actor_stops_while_it_waits_for_the_first_variables():
    program = lp.Program("waiting")
    learner = program.add_node(lp.CourierNode(Unpublished), label="learner")
    actor = lp.PyNode(lambda learner: make_actor(learner).run(), learner)
    program.add_node(actor, label="actor")
    with lp.launch(program, "threads") as run:
        run.wait(60)
    assert run.results["actor"]["steps"] == 0
