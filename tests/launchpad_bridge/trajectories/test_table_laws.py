"""What holds for every table, whatever order it gives trajectories out in."""

import concurrent.futures
import contextlib
import re
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator import rpc
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.trajectories import arguments, row_checks
from replicator.launchpad_bridge.trajectories.rows import RowForm
from replicator.launchpad_bridge.trajectories.table import (
    TableTimeoutError,
    TrajectoryError,
)
from tests.launchpad_bridge.trajectories.tables import (
    ACTORS,
    SOON_S,
    FreeDriver,
    ReplayDriver,
    ReplayTurnsDriver,
    TurnsDriver,
    ids_at,
    ids_of,
    left_in,
    rows,
)

DRIVERS = {"queue": FreeDriver, "turns": TurnsDriver, "replay": ReplayDriver}


@pytest.fixture(params=DRIVERS)
def once(request):
    """Return what drives a table that gives each row out once."""
    return DRIVERS[request.param]


@pytest.fixture(params=[*DRIVERS, "replay turns"])
def make(request, tmp_path):
    """Return what drives a table."""
    if request.param in DRIVERS:
        yield DRIVERS[request.param]
        return
    with contextlib.ExitStack() as stack:

        def start(**options):
            driver = ReplayTurnsDriver(**options, checkpoint_dir=tmp_path / "replay")
            return stack.enter_context(contextlib.closing(driver))

        yield start


def test_what_was_inserted_comes_out_once_and_whole(once):
    driver = once()
    inserted = [i for _ in range(2) for actor in ACTORS for i in driver.insert(actor)]
    taken = [ids_of(driver.table.take(6, timeout_s=SOON_S)) for _ in range(2)]
    assert sorted(taken[0] + taken[1]) == sorted(inserted)
    assert driver.table.take(6, timeout_s=0) is None


def test_too_few_trajectories_are_not_taken_and_stay(once):
    driver = once()
    driver.insert("actor/0")
    assert driver.table.take(6, timeout_s=0.01) is None
    assert left_in(driver.table) == 2


def test_a_batch_belongs_to_who_took_it(make):
    driver = make()
    for _ in range(2):
        for actor in ACTORS:
            driver.insert(actor)
    taken = driver.table.take(6, timeout_s=SOON_S)
    before = ids_of(taken)
    for _ in range(1):
        for actor in ACTORS:
            driver.insert(actor)
    assert ids_of(taken) == before
    assert all(leaf.flags.owndata for leaf in jax.tree.leaves(taken.trajectories))


def test_what_the_actor_changes_after_an_insert_changes_nothing(make):
    driver = make()
    given = rows(*ids_at("actor/0", 0))
    driver.insert("actor/0", trajectories=given)
    given["observation"]["pixels"][:] = 99
    driver.insert("actor/1")
    driver.insert("actor/2")
    assert len(ids_of(driver.table.take(6, timeout_s=SOON_S))) == 6


def test_dtypes_containers_and_versions_come_out_as_they_went_in(make):
    driver = make()
    for actor in ACTORS:
        driver.insert(actor)
    taken = driver.table.take(6, timeout_s=SOON_S)
    assert taken.trajectories["core"] == ()
    assert taken.trajectories["observation"]["pixels"].dtype == np.uint8
    assert taken.trajectories["reward"].dtype == np.float32
    assert taken.versions.dtype == np.int64
    assert taken.versions.tolist() == [0] * 6


@pytest.mark.parametrize("returns", [[1.0, 2.0], np.float32([1, 2])])
def test_returns_of_episodes_come_with_the_next_batch(make, returns):
    driver = make()
    for actor in ACTORS:
        driver.insert(actor, episodes=returns if actor == "actor/1" else [])
    assert list(driver.table.take(6, timeout_s=SOON_S).episodes) == [1.0, 2.0]
    for actor in ACTORS:
        driver.insert(actor)
    assert list(driver.table.take(6, timeout_s=SOON_S).episodes) == []


def without_pixels(tree):
    return {**tree, "observation": {"id": tree["observation"]["id"]}}


def with_pixels(change):
    def changed(tree):
        pixels = change(tree["observation"]["pixels"])
        return {**tree, "observation": {**tree["observation"], "pixels": pixels}}

    return changed


OTHER_FORMS = {
    "dtype": (
        with_pixels(np.float32),
        "`trajectories` of actor/1 must have the form of the first ones: "
        "`observation/pixels` is float32[2,3,4] instead of uint8[2,3,4]. Change what "
        "this actor inserts.",
    ),
    "shape": (
        with_pixels(lambda pixels: pixels[:, :2]),
        "`observation/pixels` is uint8[2,2,4] instead of uint8[2,3,4]",
    ),
    "count": (
        with_pixels(lambda pixels: pixels[:1]),
        "`observation/pixels` is uint8[1,3,4] instead of uint8[2,3,4]",
    ),
    "no rows": (
        lambda tree: jax.tree.map(lambda leaf: leaf[:0], tree),
        "there must be at least one row, got none",
    ),
    "a leaf less": (without_pixels, "`observation/pixels` is missing"),
    "a leaf more": (
        lambda tree: {**tree, "extra": np.ones(2)},
        "`extra` is new",
    ),
    "a list": (
        lambda tree: {**tree, "core": []},
        "`core` is PyTreeDef([]) instead of PyTreeDef(())",
    ),
    "a number": (
        lambda tree: {**tree, "reward": 1.0},
        "`reward` is float64[] instead of float32[2,3]",
    ),
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_another_form_than_the_first_is_refused_by_actor_and_leaf(make, form):
    change, text = OTHER_FORMS[form]
    driver = make()
    driver.insert("actor/0")
    with pytest.raises(TrajectoryError) as caught:
        driver.insert("actor/1", trajectories=change(rows(1, 2)))
    assert text in str(caught.value)
    assert "of actor/1" in str(caught.value)


def test_after_a_refused_insert_all_goes_on_and_it_is_counted(once):
    driver = once()
    driver.insert("actor/0")
    for _ in range(2):
        with pytest.raises(TrajectoryError):
            driver.insert("actor/1", trajectories=without_pixels(rows(1, 2)))
    driver.insert("actor/1")
    driver.insert("actor/2")
    taken = driver.table.take(6, timeout_s=SOON_S)
    assert len(set(ids_of(taken))) >= 4
    assert driver.table.statistics()["refused"] == {"actor/1": 2}


def test_a_form_given_in_advance_holds_for_the_first_insert_too(make):
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows(0)
    )
    driver = make(like=like)
    with pytest.raises(TrajectoryError, match="`observation/pixels` is missing"):
        driver.insert("actor/0", trajectories=without_pixels(rows(1, 2)))
    driver.insert("actor/0")


def test_trajectories_without_an_array_are_refused(make):
    with pytest.raises(TrajectoryError, match="there is no array in them"):
        make().insert("actor/0", trajectories={})


def test_objects_are_refused(make):
    bad = {**rows(1, 2), "info": np.array([{}, {}])}
    with pytest.raises(TrajectoryError, match="`info` must hold numbers"):
        make().insert("actor/0", trajectories=bad)


def test_strings_are_refused(make):
    bad = {**rows(1, 2), "names": np.array(["a", "b"])}
    with pytest.raises(TrajectoryError, match="`names` must hold numbers, got <U1"):
        make().insert("actor/0", trajectories=bad)


@pytest.mark.parametrize("dtype", [bool, np.complex64, jnp.bfloat16, jnp.float8_e4m3fn])
def test_numbers_of_all_kinds_are_taken(make, dtype):
    make().insert("actor/0", trajectories={**rows(1, 2), "more": np.zeros(2, dtype)})


def test_trajectories_without_a_finite_leaf_are_refused_by_actor_and_counted(make):
    driver, bad = make(), rows(0, 1)
    del bad["reward"]
    with pytest.raises(
        TrajectoryError, match=r"of actor/0 .* got none called 'reward'"
    ):
        driver.insert("actor/0", trajectories=bad)
    assert driver.table.statistics()["refused"] == {"actor/0": 1}
    driver.insert("actor/0")


def test_a_name_of_a_finite_leaf_that_is_not_there_is_an_error(make):
    with pytest.raises(ArgumentError, match="got 'rewards'; they have observation/id"):
        make(finite=("rewards",), like=jax.tree.map(lambda leaf: leaf[0], rows(0)))


SAID = {
    "version": [2**70, 2**31, -5, 0.5, None],
    "episodes": [[None], ["many"], 3, [10**400]],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in SAID for value in SAID[name]]
)
def test_what_a_learner_cannot_go_on_with_is_refused_by_actor(make, name, value):
    driver = make(on_nonfinite="keep")
    with pytest.raises(TrajectoryError, match=f"`{name}` of actor/0 must be"):
        driver.insert("actor/0", **{name: value})
    assert driver.table.statistics()["refused"] == {"actor/0": 1}
    for actor in ACTORS:
        driver.insert(actor, episodes=[np.float32(1.5)] if actor == "actor/0" else [])
    assert driver.table.take(6, timeout_s=SOON_S).episodes == [1.5]


@pytest.mark.parametrize("count", [4_096, 4_097])
def test_trajectories_have_at_most_as_many_nodes_as_is_said(count):
    leaf, tree = np.ones(2), []
    for _ in range(count - 4_000):
        tree = [tree]
    assert arguments.ROWS.is_right([tree, *[leaf] * 3_998]) is (count == 4_096)


MANY = range(20_000_000)
HOSTILE = {
    "returns in a range": {"episodes": MANY},
    "a range of returns": {"episodes": [MANY]},
    "many returns": {"episodes": [0.0] * 70_000},
    "a range as a leaf": {"trajectories": {"reward": MANY}},
    "a range as rows": {"trajectories": MANY},
    "rows of no bytes": {"trajectories": {"reward": np.zeros((1 << 30, 0))}},
    "more rows of no bytes": {"trajectories": {"reward": np.zeros((2, 1 << 40, 0))}},
    "many leaves": {"trajectories": [np.ones(2)] * 5_000},
    "many nodes": {"trajectories": {"reward": np.ones(2), "core": [()] * 5_000}},
    "names that are long": {"trajectories": {"x" * 300: np.ones(2)}},
    "names of other kinds": {"trajectories": {"a": np.ones(2), (1, 2): np.ones(2)}},
    "a list of numbers as snapshot": {"snapshot": [1]},
    "an actor of a long name": {"actor": "x" * 1_000_000},
    "no actor": {"actor": MANY},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_sent_to_do_harm_is_refused_unread(make, what):
    driver = make(finite=())
    said = {"trajectories": rows(0, 1), "actor": "actor/0", "version": 0, "number": 0}
    tracemalloc.start()
    with pytest.raises((TrajectoryError, ArgumentError), match=r"must (be|have)"):
        driver.table.insert(**said | HOSTILE[what])
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert all(len(name) < 300 for name in driver.table.statistics()["refused"])
    driver.insert("actor/0")


def test_rows_that_there_is_no_memory_for_do_not_fix_the_form(make, monkeypatch):
    driver = make(finite=())
    with monkeypatch.context() as patch:
        patch.setattr(RowForm, "make_rows", no_memory)
        with pytest.raises(MemoryError):
            driver.insert("actor/0", trajectories={"wide": np.ones((2, 5))})
    driver.insert("actor/0")


def no_memory(*_):
    raise MemoryError


def test_what_a_sender_changes_after_it_was_looked_at_is_not_taken(make, monkeypatch):
    driver, given = make(on_nonfinite="raise"), rows(0, 1)
    looked = row_checks.finite_rows

    def look(leaves, count):
        found = looked(leaves, count)
        given["reward"][:] = np.nan  # as its sender may, in shared memory
        return found

    monkeypatch.setattr(row_checks, "finite_rows", look)
    driver.insert("actor/0", trajectories=given)
    monkeypatch.undo()
    for actor in ACTORS[1:]:
        driver.insert(actor)
    taken = driver.table.take(6, timeout_s=SOON_S)
    assert np.isfinite(taken.trajectories["reward"]).all()


def test_actors_whose_refused_inserts_are_counted_are_bounded(monkeypatch):
    monkeypatch.setattr(row_checks, "_MOST_ACTORS", 3)
    driver = FreeDriver()
    for k in [*range(10), 0]:
        with pytest.raises(TrajectoryError):
            driver.table.insert(rows(k), actor=f"made up {k}", version=-1)
    counts = driver.table.statistics()["refused"]
    assert counts == {"made up 0": 2, "made up 1": 1, "made up 2": 1, "others": 7}


def test_a_name_stands_for_all_leaves_below_it(make):
    driver = make(finite=("extras",), on_nonfinite="raise")
    extras = {"logits": np.array([[0.0], [np.inf]], np.float32)}
    with pytest.raises(TrajectoryError, match="infinity in `extras/logits` of 1 of 2"):
        driver.insert("actor/0", trajectories={**rows(0, 1), "extras": extras})


def test_kept_trajectories_that_are_not_finite_are_counted(once):
    driver = once(on_nonfinite="keep")
    driver.insert("actor/0", trajectories=rows(0, 1, reward=np.nan))
    driver.insert("actor/1")
    driver.insert("actor/2")
    taken = driver.table.take(6, timeout_s=SOON_S)
    assert np.isnan(taken.trajectories["reward"]).any(axis=1).sum() == 2
    assert driver.table.statistics()["nonfinite"] == 2


def test_what_is_raised_for_nan_reaches_the_actor_and_is_counted(make):
    driver = make(on_nonfinite="raise")
    with pytest.raises(
        TrajectoryError, match=r"of actor/0 must .* in `reward` of 2"
    ) as e:
        driver.insert("actor/0", trajectories=rows(0, 1, reward=np.nan))
    assert '`on_nonfinite="keep"`' in str(e.value)  # which every table takes
    assert driver.table.statistics()["refused"] == {"actor/0": 1}
    driver.insert("actor/0")


def work(driver, actor, count):
    return [i for _ in range(count) for i in driver.insert(actor)]


def test_many_threads_insert_and_each_trajectory_comes_out_once(once):
    driver, count = once(), 100
    with concurrent.futures.ThreadPoolExecutor() as pool:
        inserting = [pool.submit(work, driver, actor, count) for actor in ACTORS]
        batches = [ids_of(driver.table.take(6, timeout_s=SOON_S)) for _ in range(count)]
        inserted = sorted(i for each in inserting for i in each.result(SOON_S))
    assert sorted(i for batch in batches for i in batch) == inserted
    counts = driver.table.statistics()
    assert (counts["inserted"], counts["taken"]) == (6 * count, 6 * count)
    assert left_in(driver.table) == 0


ONE_EACH = lp.RateLimiter(min_size=1, samples_per_insert=1, error=7)
FULL = {
    "replay": (lambda: ReplayDriver(capacity=16, limiter=ONE_EACH), 4),
    "queue": (lambda: FreeDriver(capacity=8), 4),
    "turns": (lambda: TurnsDriver(lag=0), 2),
}


@pytest.fixture(params=FULL)
def full(request):
    """Return a driver whose next insert has no room, and how to make some."""
    make_driver, inserts = FULL[request.param]
    driver = make_driver()
    for _ in range(inserts):
        driver.insert("actor/0")
    return driver


def make_room(driver):
    if isinstance(driver, TurnsDriver):
        driver.insert("actor/1")
        driver.insert("actor/2")
    driver.table.take(6, timeout_s=SOON_S)


def insert_next(driver):
    """Return an insert for which there is no room, as arguments."""
    turn = driver.table.turn("actor/0")
    return {
        "trajectories": rows(*ids_at("actor/0", 9)),
        "actor": "actor/0",
        "version": turn.version or 0,
        "number": turn.number,
    }


def test_an_insert_without_room_waits_until_there_is_some(full):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        inserting = pool.submit(full.table.insert, **insert_next(full))
        with pytest.raises(concurrent.futures.TimeoutError):
            inserting.result(0.05)
        make_room(full)
        inserting.result(SOON_S)


def test_a_blocked_insert_gives_up_before_its_deadline_and_says_why(full):
    arguments = insert_next(full)
    with rpc.Server(full.table) as server, rpc.Client(server.address) as client:
        for timeout_s in (1.2, 4.0, 20.0):  # a busy machine may answer too late
            with pytest.raises(TimeoutError) as late:
                client.call("insert", [], arguments, timeout_s=timeout_s)
            if isinstance(late.value, TableTimeoutError):
                break
    assert re.search(r"8 of 8 wait|2 of 6 turns|8 rows inserted, 0", str(late.value))


def test_a_blocked_insert_ends_when_its_caller_is_gone(full):
    arguments, inserted = insert_next(full), full.table.statistics()["inserted"]
    with rpc.Server(full.table) as server:
        with rpc.Client(server.address) as client:
            client.futures.insert(**arguments)
            wait_until(lambda: server.statistics().running > 0)
        wait_until(lambda: server.statistics().running == 0)
    assert full.table.statistics()["inserted"] == inserted


def test_a_blocked_insert_does_not_hold_up_a_server_that_stops(full):
    arguments = insert_next(full)
    with rpc.Server(full.table) as server, rpc.Client(server.address) as client:
        inserting = client.futures.insert(**arguments)
        wait_until(lambda: server.statistics().running > 0)
        server.stop(0.0)
        assert inserting.exception(SOON_S) is not None
        wait_until(lambda: server.statistics().running == 0)


def wait_until(is_so):
    """Ask, for a while, until something is so."""
    until_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def blinded(*ids):
    """Return trajectories whose first has seen NaN."""
    found = rows(*ids)
    found["observation"]["speed"] = np.zeros((len(ids), 3), np.float32)
    found["observation"]["speed"][0, 1] = np.nan
    return found


def test_an_observation_that_is_no_number_is_counted_by_default():
    for driver, left in ((FreeDriver(), 1), (TurnsDriver(), 2)):
        number = {"number": 0, "version": 0} if left == 2 else {}
        driver.insert(trajectories=blinded(1, 2), **number)
        counts = driver.table.statistics()
        assert (counts["inserted"], counts["nonfinite"]) == (left, 1)


def test_the_last_observation_of_an_item_is_checked_by_default(make):
    driver, given = make(on_nonfinite="raise"), rows(1, 2)
    given["next_observation"] = np.array([[0.0], [np.inf]], np.float32)
    with pytest.raises(TrajectoryError, match="in `next_observation` of 1 of 2"):
        driver.insert(trajectories=given)


def test_who_wants_an_error_is_told_the_actor_and_the_leaf(make):
    driver = make(on_nonfinite="raise")
    message = "of actor/0 must be finite, got .* in `observation/speed` of 1 of 2"
    with pytest.raises(TrajectoryError, match=message):
        driver.insert(trajectories=blinded(1, 2))


def test_an_infinite_logit_of_an_action_that_is_not_there_is_kept():
    masked = rows(1, 2) | {"extras": {"logits": np.full((2, 3, 2), -np.inf)}}
    driver = FreeDriver()
    driver.insert(trajectories=masked)
    assert driver.table.statistics()["inserted"] == 2
