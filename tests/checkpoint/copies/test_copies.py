"""A state comes back from the memory of a launcher, or from the disk where it must."""

import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from replicator.base.mesh import replica_mesh
from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.checkpoint.copies import keeper as keepers
from replicator.checkpoint.copies.keeper import VARIABLE, serve_keeper
from replicator.errors import ArgumentError, CheckpointMismatchError
from replicator.training.options import RunOptions, checkpointing_of
from tests.checkpoint.states import bits, run_state


@pytest.fixture(autouse=True)
def keeper(tmp_path, monkeypatch):
    """The keeper of a launcher, whose memory may be damaged."""
    made = []
    monkeypatch.setattr(
        keepers, "Keeper", lambda most: made.append(Kept(most)) or made[0]
    )
    folder = tmp_path / "launcher"
    folder.mkdir(mode=0o700)
    with serve_keeper(folder, most_bytes=1 << 24) as variables:
        monkeypatch.setenv(VARIABLE, variables[VARIABLE])
        yield made[0]


Kept = type("Kept", (keepers.Keeper,), {"__module__": __name__})


def state_of(step):
    """Whole, cut and declared leaves, keys, small and large ones, odd dtypes."""
    mesh = replica_mesh(8)
    cut = np.random.default_rng(step).standard_normal((64, 600)).astype(np.float32)
    return run_state(8) | {
        "rows": jax.device_put(cut, NamedSharding(mesh, P("replica"))),
        "columns": jax.device_put(cut, NamedSharding(mesh, P(None, "replica"))),
        "whole": jax.device_put(cut + 1, NamedSharding(mesh, P())),
        "number": jnp.int32(step),
        "int4": np.array([[-8, 7, step % 8]], ml_dtypes.int4),
        "empty": np.zeros((0, 3), np.float32),
        "none": None,
    }


def copy(store, step, **fields):
    assert store.copies.save_nowait(
        Snapshot(step=step, arrays=state_of(step), **fields)
    )
    store.copies._saver.wait()
    assert store.copies.last_step == step


def save(store, step):
    store.save(Snapshot(step=step, arrays=state_of(step)))


def open_store(tmp_path, **options):
    return CheckpointStore(tmp_path / "checkpoints", copies=True, **options)


def restored(tmp_path):
    with open_store(tmp_path) as store:
        return store.restore(state_of(0))


def test_a_copy_comes_back_bit_for_bit_with_all_that_is_saved_with_it(tmp_path):
    with open_store(tmp_path) as store:
        save(store, 1)
        copy(store, 7, meta={"a": 1}, own={"b": 2}, metrics={"loss": 0.5})
    found = restored(tmp_path)
    assert (found.step, found.source, found.lost) == (7, "memory", ())
    assert bits(found.arrays) == bits(state_of(7))
    assert [leaf.sharding for leaf in jax.tree.leaves(found.arrays["rows"])] == [
        leaf.sharding for leaf in jax.tree.leaves(state_of(7)["rows"])
    ]
    assert (found.meta, found.own) == ({"a": 1}, ({"b": 2},))
    assert found.metrics == {"loss": 0.5}


def test_a_copy_comes_back_in_each_start_until_a_later_step_is_saved(tmp_path):
    with open_store(tmp_path) as store:
        copy(store, 7)
    for _ in range(3):
        assert restored(tmp_path).step == 7
    with open_store(tmp_path) as store:
        save(store, 9)
    found = restored(tmp_path)
    assert (found.step, found.source) == (9, "disk")


def test_another_layout_reads_what_it_needs_of_the_copies(tmp_path):
    with open_store(tmp_path) as store:
        copy(store, 7)
    like = state_of(0)
    like["rows"], like["columns"] = like["columns"], like["rows"]
    with open_store(tmp_path) as store:
        found = store.restore(like)
    assert found.source == "memory"
    assert bits(found.arrays) == bits(state_of(7))


def test_a_damaged_copy_is_never_used(tmp_path, keeper, caplog):
    with open_store(tmp_path) as store:
        save(store, 1)
        copy(store, 5)
        copy(store, 10)
        for step, (tree, read) in list(held(keeper).items()):
            held(keeper)[step] = (tree, flipped(read) if step == 10 else read)
    caplog.set_level(logging.ERROR)
    found = restored(tmp_path)
    assert (found.step, found.source) == (5, "memory")
    assert "got other bytes. Take it from elsewhere" in caplog.text
    assert bits(found.arrays) == bits(state_of(5))
    tree, read = held(keeper)[5]
    held(keeper)[5] = (tree, flipped(read))
    found = restored(tmp_path)
    assert (found.step, found.source) == (1, "disk")
    assert held(keeper) == {}  # a later start does not find it either


def held(keeper):
    [run] = keeper._runs.values()
    return run.of[0].whole


def flipped(read):
    def damaged(number):
        data = bytearray(read(number))
        data[-1] ^= 16
        return data

    return damaged


def test_a_run_that_went_back_finds_no_copy_of_the_steps_it_left(tmp_path):
    with open_store(tmp_path) as store:
        save(store, 1)
        copy(store, 5)
        copy(store, 10)
        store.discard_after(7)
    assert restored(tmp_path).step == 5
    with open_store(tmp_path) as store:
        store.discard_after(4)
    assert restored(tmp_path).source == "disk"


def test_a_loop_that_went_on_from_an_older_step_finds_its_own_copies(tmp_path):
    with open_store(tmp_path) as store:
        save(store, 1)
        copy(store, 50)
    with open_store(tmp_path) as store:
        store.restore(state_of(0), step=1)
        for step in (5, 10):
            copy(store, step)
    found = restored(tmp_path)
    assert (found.step, found.source) == (10, "memory")


def test_a_step_that_all_processes_have_stays_held(tmp_path, keeper, monkeypatch):
    with open_store(tmp_path) as store:
        copy(store, 5)
        # Another process did not hand over the next one.
        monkeypatch.setattr(
            store._group, "share", lambda what, own: [own, {**own, "last": 5}]
        )
        for step in (10, 15):
            assert store.copies.save_nowait(Snapshot(step=step, arrays=state_of(step)))
            store.copies._saver.wait()
    assert set(held(keeper)) == {5, 15}


def test_a_run_that_is_killed_while_it_tidies_loses_no_copy(tmp_path, monkeypatch):
    with open_store(tmp_path) as store:
        copy(store, 5)
    killed = open_store(tmp_path)
    monkeypatch.setattr(killed._directory, "tidy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        killed.open()
    assert restored(tmp_path).step == 5


def interrupted(**_):
    raise KeyboardInterrupt


def test_a_launcher_that_does_not_answer_keeps_no_directory(tmp_path, monkeypatch):
    store = open_store(tmp_path).open()

    def close():
        store.copies._keeper.close()
        raise TimeoutError

    monkeypatch.setattr(store.copies, "close", close)
    with pytest.raises(TimeoutError):
        store.close()
    assert restored(tmp_path) is None


def test_a_directory_that_was_made_anew_has_no_copies(tmp_path):
    with open_store(tmp_path) as store:
        copy(store, 5)
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    assert restored(tmp_path) is None


def test_a_run_that_has_ended_leaves_no_copy(tmp_path, keeper):
    with open_store(tmp_path) as store:
        copy(store, 5)
        store.copies.drop(above=-1)
        assert held(keeper) == {}


def test_copies_of_another_model_are_refused_as_its_checkpoint_is(tmp_path):
    with open_store(tmp_path) as store:
        copy(store, 5)
    with (
        open_store(tmp_path) as store,
        pytest.raises(CheckpointMismatchError, match="was not saved"),
    ):
        store.restore(state_of(0) | {"other": np.zeros(3)})


def test_a_store_without_copies_makes_none(tmp_path):
    with CheckpointStore(tmp_path / "checkpoints") as store:
        assert store.copies is None


def test_without_a_launcher_an_error_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    options = RunOptions(checkpoint_dir=tmp_path / "c", memory_copy_every=5)
    with pytest.raises(ArgumentError, match="in a run under `replicator launch`"):
        checkpointing_of(options)
    with pytest.raises(ArgumentError, match="must be in a run under"):
        open_store(tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_launchers_that_do_not_reach_each_other_are_refused(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    others = {"keepers": ["unix:/another/host"]}
    monkeypatch.setattr(
        store._group, "share", lambda what, own: [own, *others.get(what, ())]
    )
    with pytest.raises(ArgumentError, match="replicator launch --copies-host"):
        store.open()


def test_a_launcher_without_room_for_two_copies_refuses_them(tmp_path, keeper):
    keeper._most_bytes = 100_000
    with (
        open_store(tmp_path) as store,
        pytest.raises(ArgumentError, match=r"two copies .* got \d+ bytes too few"),
    ):
        store.copies.save_nowait(Snapshot(step=1, arrays=state_of(1)))
