"""What is saved comes back, bit for bit; what cannot be is refused."""

import collections
import json
import os
import resource
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from replicator.base.mesh import replica_mesh, replicated
from replicator.checkpoint import CheckpointStore, Snapshot, background
from replicator.checkpoint.disk import Disk
from replicator.checkpoint.lock import LOCK_NAME
from replicator.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointInUseError,
    CheckpointMismatchError,
)
from replicator.training.options import Retention
from tests.checkpoint.states import bits, run_state, small_snapshot, small_state
from tests.fakes import FakeClock

DTYPES = (
    *("bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("int64", "uint64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz"),
)


def every_dtype():
    """Arrays of random bits, where all bits of a byte are the value's."""
    rng = np.random.default_rng(0)
    arrays = {}
    for name in DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        if name in ("bool", "int4", "uint4"):
            arrays[name] = rng.integers(0, 2, (3, 5)).astype(dtype)
        else:
            raw = rng.integers(0, 256, 15 * dtype.itemsize, dtype=np.uint8)
            arrays[name] = raw.view(dtype).reshape(3, 5)
    return arrays


def save_and_restore(folder, arrays, like=None):
    with CheckpointStore(folder) as store:
        store.save(Snapshot(step=1, arrays=arrays))
        return store.restore(like).arrays


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    arrays = every_dtype()
    assert bits(save_and_restore(tmp_path, arrays)) == bits(arrays)


def test_strange_numbers_and_shapes_come_back(tmp_path):
    arrays = {
        "negative zero": np.full(4, -0.0, np.float32),
        "a nan/with payload": np.asarray([0x7FC00001, 0xFFC12345], np.uint32).view("f"),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.asarray(7, np.int16),
        "nested": [np.ones(2), {"0": np.zeros((1, 1, 1))}],
    }
    assert bits(save_and_restore(tmp_path, arrays, arrays)) == bits(arrays)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_come_back_as_keys(tmp_path, impl):
    keys = {"one": jax.random.key(5, impl=impl)}
    keys["many"] = jax.random.split(keys["one"], (2, 3))
    restored = save_and_restore(tmp_path, keys, keys)
    assert bits(restored) == bits(keys)
    assert restored["one"].dtype == keys["one"].dtype


def test_a_state_comes_back_to_where_it_was(tmp_path):
    state = run_state(8)
    restored = save_and_restore(tmp_path, state, state)
    assert bits(restored) == bits(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for before, after in zip(*map(jax.tree.leaves, (state, restored)), strict=True):
        assert after.sharding == before.sharding


def test_shapes_with_shardings_say_where_to_restore_to(tmp_path):
    state = run_state(8)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restored = save_and_restore(tmp_path, state, like)
    assert bits(restored) == bits(state)
    assert restored["sums"].value.sharding == state["sums"].value.sharding


def test_without_like_it_is_nested_dicts_by_path(tmp_path):
    restored = save_and_restore(tmp_path, run_state(2))
    assert sorted(restored) == ["key", "step", "sums", "w"]
    assert type(restored["sums"]["value"]) is np.ndarray


def test_meta_and_metrics_come_back(tmp_path):
    meta = {"position": 12, "hooks": [{"seen": 0.1, "none": None}]}
    metrics = {"loss": 0.1, "worst": float("inf")}
    with CheckpointStore(tmp_path) as store:
        store.save(Snapshot(step=3, arrays=small_state(3), meta=meta, metrics=metrics))
    restored = CheckpointStore(tmp_path).restore()
    assert (restored.step, restored.meta, restored.metrics) == (3, meta, metrics)


def test_a_snapshot_is_not_changed_by_the_step_that_takes_its_state_over(tmp_path):
    sharding = replicated(replica_mesh(8))
    state = jax.device_put({"w": jnp.arange(1 << 16, dtype=jnp.float32)}, sharding)
    before = bits(state)
    step = jax.jit(lambda s: jax.tree.map(lambda x: -x, s), donate_argnums=0)
    begun, go = threading.Event(), threading.Event()

    def hold(operation, path):
        if operation == "write_arrays":
            begun.set()
            assert go.wait(60)

    with CheckpointStore(tmp_path, disk=Disk(hold)) as store:
        assert store.save_nowait(Snapshot(step=1, arrays=state))
        assert begun.wait(60)
        for _ in range(3):
            state = step(state)
        jax.block_until_ready(state)
        go.set()
        store.wait()
        assert bits(store.restore().arrays) == before


def test_numpy_leaves_and_meta_are_copied_too(tmp_path):
    arrays, meta = small_state(1), {"position": [1]}
    with CheckpointStore(tmp_path) as store:
        store.save_nowait(Snapshot(step=1, arrays=arrays, meta=meta))
        arrays["params"]["w"][:] = 9
        meta["position"].append(2)
        store.wait()
        restored = store.restore()
    assert bits(restored.arrays) == bits(small_state(1))
    assert restored.meta == {"position": [1]}


@pytest.mark.parametrize("now", [1, 2, 4])
def test_another_number_of_replicas_gets_exact_values_and_is_told(tmp_path, now):
    before, like = run_state(8), run_state(now)
    with CheckpointStore(tmp_path) as store:
        store.save(Snapshot(step=7, arrays=before))
        restored = store.restore(like)
    whole = [name for name in before if name != "sums"]
    for name in whole:
        assert bits(restored.arrays[name]) == bits(before[name])
    total = np.asarray(before["sums"].value).sum(axis=0)
    np.testing.assert_array_equal(restored.arrays["sums"].value.sum(axis=0), total)
    assert restored.lost[0].startswith("Step 7 was saved on 8 devices, and is restored")
    assert restored.lost[1:] == ("`sums/value` is the sum of 8 replicas.",)


def test_on_the_same_number_of_replicas_nothing_is_lost(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(Snapshot(step=7, arrays=run_state(4)))
        assert store.restore(run_state(4)).lost == ()


def test_a_leaf_that_refuses_another_number_of_replicas_is_named(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(Snapshot(step=7, arrays=run_state(4, on_resize="refuse")))
        with pytest.raises(
            CheckpointMismatchError, match="`sums/value` must have the 4"
        ):
            store.restore(run_state(2, on_resize="refuse"))
        # The remedy that the error tells.
        assert store.restore(run_state(2, on_resize="first")).step == 7


def test_a_part_is_restored_and_the_rest_stays(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(Snapshot(step=1, arrays=small_state(1)))
        like = {**small_state(5), "head": np.full(2, 5.0)}
        restored = store.restore(like, only="params/*")
    assert bits(restored.arrays["params"]) == bits(small_state(1)["params"])
    assert bits(restored.arrays["head"]) == bits(like["head"])
    assert restored.arrays["count"] == 5


def other_model():
    return {
        "params": {"w": np.zeros((4, 2), np.float32), "b": np.zeros(3)},
        "count": np.zeros((), np.int64),
    }


@pytest.mark.parametrize(
    ("like", "only", "message"),
    [
        (
            other_model(),
            None,
            "The state must be that of the model that was saved at step 1, got "
            "another: `count` was saved as int32[] and is int64[]; `params/b` was not "
            "saved; `params/w` was saved as float32[4,3] and is float32[4,2]. Begin "
            "anew in another directory, or restore a part with "
            "`CheckpointStore.restore(..., only=...)`.",
        ),
        (
            {"count": np.zeros((), np.int32)},
            None,
            "The state must be that of the model that was saved at step 1, got "
            "another: `params/w` was saved and is not in the state. Begin anew in "
            "another directory, or restore a part with "
            "`CheckpointStore.restore(..., only=...)`.",
        ),
        (
            small_state(0),
            "weights/*",
            "`only` must match a leaf of `like`, got 'weights/*', which matches none. "
            'Write for example `only="user/params/*"`.',
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, like, only, message):
    with CheckpointStore(tmp_path) as store:
        store.save(small_snapshot(1))
        with pytest.raises(CheckpointMismatchError) as caught:
            store.restore(like, only=only)
    assert str(caught.value) == message


def test_retention_deletes_and_best_is_found(tmp_path):
    policy = Retention(keep_last=1, keep_best=1, metric="loss", keep_every=4)
    with CheckpointStore(tmp_path, retention=policy) as store:
        for step, loss in enumerate([3.0, 1.0, 2.0, 5.0, 4.0], start=1):
            arrays = small_state(step)
            store.save(Snapshot(step=step, arrays=arrays, metrics={"loss": loss}))
        assert store.steps() == (2, 4, 5)
        assert store.best == 2
        assert bits(store.restore(step=2).arrays) == bits(small_state(2))
    assert not list(tmp_path.glob(".deleting-*"))


def test_a_reopened_store_remembers_what_it_keeps(tmp_path):
    for step in (1, 2, 3):
        with CheckpointStore(tmp_path, retention=Retention(keep_last=2)) as store:
            store.save(small_snapshot(step))
    assert CheckpointStore(tmp_path).steps() == (2, 3)


def test_a_run_that_goes_back_saves_the_same_step_again(tmp_path):
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2, 3):
            store.save(small_snapshot(step))
        assert store.discard_after(1) == (2, 3)
        assert store.restore().step == 1
        store.save(Snapshot(step=2, arrays=small_state(20)))
        store.save(Snapshot(step=2, arrays=small_state(21)))
        assert store.steps() == (1, 2)
        assert bits(store.restore().arrays) == bits(small_state(21))


def test_nothing_saved_yet_restores_nothing(tmp_path):
    with CheckpointStore(tmp_path / "new" / "deeper") as store:
        assert store.restore() is None
        assert (store.steps(), store.best) == ((), None)


def test_a_step_that_was_not_saved_is_refused_with_those_that_were(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(small_snapshot(5))
        with pytest.raises(CheckpointError, match=r"got 4 \(there: 5\)"):
            store.restore(step=4)


def test_a_second_writer_is_refused_and_the_owner_named(tmp_path):
    with CheckpointStore(tmp_path) as first:
        first.save(small_snapshot(1))
        with pytest.raises(CheckpointInUseError, match=f"process {os.getpid()} on "):
            CheckpointStore(tmp_path).open()
        assert CheckpointStore(tmp_path).restore().step == 1  # readers may
    with CheckpointStore(tmp_path) as second:
        second.save(small_snapshot(2))


def test_an_owner_that_was_replaced_commits_no_more(tmp_path):
    with CheckpointStore(tmp_path) as stale:
        stale.save(small_snapshot(1))
        # A file system that forgets locks, or a person who removes one.
        (tmp_path / LOCK_NAME).unlink()
        with CheckpointStore(tmp_path) as current:
            with pytest.raises(CheckpointInUseError, match="as its only writer"):
                stale.save(small_snapshot(9))
            with pytest.raises(CheckpointInUseError, match="end this run"):
                stale.save_nowait(small_snapshot(10))
            current.save(small_snapshot(2))
            assert current.steps() == (1, 2)
    assert not list(tmp_path.glob(".writing-*"))


def test_generations_grow_even_if_the_owner_file_is_lost(tmp_path):
    for step in (1, 2):
        with CheckpointStore(tmp_path) as store:
            store.save(small_snapshot(step))
        (tmp_path / ".writer.json").unlink()
    manifests = sorted(tmp_path.glob("*/manifest.json"))
    read = [json.loads(path.read_text())["manifest"] for path in manifests]
    assert [manifest["generation"] for manifest in read] == [1, 2]


@pytest.mark.parametrize(("runs_s", "told"), [(11.0, True), (9.0, False)])
def test_a_save_is_skipped_while_one_runs_and_that_told_if_it_is_long(
    runs_s, told, tmp_path, caplog
):
    clock, go = FakeClock(), threading.Event()

    def hold(operation, path):
        assert operation != "write_arrays" or go.wait(60)

    with CheckpointStore(tmp_path, disk=Disk(hold), clock=clock) as store:
        assert store.save_nowait(small_snapshot(1))
        clock.advance(runs_s)
        assert not store.save_nowait(small_snapshot(2))
        go.set()
        store.wait()
        assert (store.counts.saved, store.counts.skipped) == (1, 1)
        assert store.steps() == (1,)
    assert ("Step 2 is not saved" in caplog.text) is told


def test_a_wait_is_bounded(tmp_path):
    go = threading.Event()

    def hold(operation, path):
        assert operation != "write_arrays" or go.wait(60)

    store = CheckpointStore(tmp_path, disk=Disk(hold), timeout_s=0.01).open()
    store.save_nowait(small_snapshot(1))
    with pytest.raises(TimeoutError, match=r"must end within 0\.01 s"):
        store.wait()
    go.set()


def test_a_save_tells_how_long_it_took(tmp_path):
    clock = FakeClock()
    disk = Disk(lambda operation, _: clock.advance(operation == "write_arrays"))
    with CheckpointStore(tmp_path, clock=clock, disk=disk) as store:
        store.save(small_snapshot(1))
        assert store.counts.last_save_s == 1.0


class FullDisk:
    """Makes every file that is longer fail, as the system does (EFBIG)."""

    def __init__(self, *, largest=100):
        self._largest = largest

    def __enter__(self):
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._largest, self._limits[1]))

    def __exit__(self, *failure):
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


def test_training_goes_on_when_the_disk_is_full_and_later_saves_work(tmp_path, caplog):
    with CheckpointStore(tmp_path) as store:
        store.save(small_snapshot(1))
        with FullDisk():
            assert store.save_nowait(small_snapshot(2))
            store.wait()
        assert store.counts.failed == 1
        assert store.restore().step == 1
        assert not list(tmp_path.glob(".writing-*"))
        store.save(small_snapshot(3))
        assert store.counts.failed_in_a_row == 0
        assert store.steps() == (1, 3)
    assert "Step 2 could not be saved, training goes on" in caplog.text


def test_a_failed_save_is_told_in_one_line(tmp_path, caplog):
    with CheckpointStore(tmp_path) as store:
        with FullDisk(largest=1 << 16):  # room for directories, none for the array
            store.save_nowait(Snapshot(step=1, arrays={"w": np.ones(100_000)}))
            store.wait()
        assert store.counts.failed == 1
    # Threads of other tests in this process may log, too.
    [told] = [each for each in caplog.records if each.name == background.__name__]
    assert "\n" not in told.getMessage()
    assert "tensorstore_spec" not in caplog.text


def test_what_a_failed_save_left_goes_with_the_next(tmp_path):
    with CheckpointStore(tmp_path) as store:
        (tmp_path / ".writing-1-late" / "state").mkdir(parents=True)
        store.save(small_snapshot(2))
    assert not list(tmp_path.glob(".writing-*"))


def test_too_many_failures_in_a_row_stop_training(tmp_path):
    with CheckpointStore(tmp_path, failures_allowed=2) as store:
        with FullDisk():
            for step in (1, 2):
                store.save_nowait(small_snapshot(step))
                store.wait()
        with pytest.raises(CheckpointError, match=r"the last 2 refused: .*Make room"):
            store.save_nowait(small_snapshot(3))


def test_the_last_save_of_a_run_raises_what_it_meets(tmp_path):
    refused = pytest.raises(CheckpointError, match="must be writable, got the last")
    with CheckpointStore(tmp_path) as store, FullDisk(), refused:
        store.save(small_snapshot(1))


def test_what_dead_owners_left_is_removed(tmp_path):
    for name in (".writing-3-1/state", ".deleting-000000000001-0"):
        (tmp_path / name).mkdir(parents=True)
    with CheckpointStore(tmp_path):
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {".writer.lock", ".writer.json"}


def test_a_leftover_that_cannot_be_removed_stops_nothing(tmp_path, caplog):
    left = f".deleting-{1:012d}-0"
    (tmp_path / left).mkdir()
    (tmp_path / left / "stale").touch()

    def refuse(operation, path):
        if operation == "remove_file" and path.name == "stale":
            raise PermissionError(1, "Operation not permitted")

    with CheckpointStore(tmp_path, disk=Disk(refuse)) as store:
        store.save(small_snapshot(1))
        assert f"{left} is left over and cannot be removed" in caplog.text
    with CheckpointStore(tmp_path) as store:
        assert not (tmp_path / left).exists()
        assert store.steps() == (1,)


def test_what_retention_cannot_remove_is_no_checkpoint_and_fails_no_save(tmp_path):
    def refuse(operation, path):
        if operation == "remove_directory":
            raise OSError(39, "Directory not empty", str(path))  # `.nfs…` is in it

    policy = Retention(keep_last=1)
    with CheckpointStore(tmp_path, disk=Disk(refuse), retention=policy) as store:
        for step in (1, 2, 2):
            store.save(small_snapshot(step))
        assert store.counts.failed == 0
        assert store.steps() == (2,)
        store.discard_after(1)
        assert store.steps() == ()


def test_a_step_that_cannot_be_named_again_keeps_the_one_that_has_the_name(tmp_path):
    refused = []

    def refuse(operation, path):
        if operation == "rename" and path.name == f"{1:012d}" and not refused:
            refused.append(path)
            raise OSError(5, "Input/output error")

    with CheckpointStore(tmp_path) as store:
        store.save(small_snapshot(1))
    with CheckpointStore(tmp_path, disk=Disk(refuse)) as store:
        with pytest.raises(CheckpointError, match="Input/output error"):
            store.save(small_snapshot(1))
        assert store.restore(step=1).meta == {"number": 1}


def test_what_was_moved_aside_for_a_save_that_never_came_is_there_again(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(small_snapshot(1))
    (tmp_path / f"{1:012d}").rename(tmp_path / f".replaced-{1:012d}-0")
    with CheckpointStore(tmp_path) as store:
        assert store.steps() == (1,)
        assert store.restore().meta == {"number": 1}


@pytest.mark.parametrize("refused", ["remove_file", "remove_directory"])
def test_a_replaced_copy_that_cannot_be_removed_never_comes_back(tmp_path, refused):
    def refuse(operation, path):
        if operation == refused:
            raise OSError(39, "Directory not empty", str(path))  # `.nfs…` is in it

    with CheckpointStore(tmp_path, disk=Disk(refuse)) as store:
        for step in (2, 2):
            store.save(small_snapshot(step))
        store.discard_after(1)  # the run goes back to its beginning
    with CheckpointStore(tmp_path) as store:
        assert store.restore() is None


def test_newest_is_what_was_saved_last_even_if_a_run_began_anew(tmp_path):
    for step in (100, 1):
        with CheckpointStore(tmp_path) as store:
            store.save(small_snapshot(step))
    assert CheckpointStore(tmp_path).restore().step == 1


def foreign(folder):
    (folder / "thesis.tex").touch()
    return folder


def a_file(folder):
    path = folder / "file"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("make", "use", "message"),
    [
        (lambda f: f / "absent", CheckpointStore.restore, "which is not a directory"),
        (lambda f: f, CheckpointStore.steps, "which has no checkpoint. Check the path"),
        (foreign, CheckpointStore.open, "with `thesis.tex` in it. Save to a directory"),
        (a_file, CheckpointStore.open, "checkpoints must be writable, got `.*/file`"),
        (lambda f: a_file(f) / "below", CheckpointStore.open, "must be writable"),
    ],
)
def test_a_directory_that_cannot_serve_is_refused(tmp_path, make, use, message):
    with pytest.raises(CheckpointError, match=message):
        use(CheckpointStore(make(tmp_path)))


def two_at_one_path():
    return collections.OrderedDict([(1, np.zeros(1)), ("1", np.zeros(1))])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": -1}, "`step` must be between 0 and 10"),
        ({"arrays": {}}, "`arrays` must have a leaf, got none"),
        ({"arrays": {"f": open}}, "`arrays` must hold arrays only, got builtin"),
        ({"arrays": two_at_one_path()}, "must have one leaf at each path"),
        ({"meta": {"x": np.zeros(1)}}, "`meta` must be plain JSON"),
        ({"meta": {"x": float("nan")}}, "`meta` must be plain JSON"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_the_door(tmp_path, fields, message):
    snapshot = Snapshot(**{"step": 1, "arrays": small_state(1), **fields})
    with (
        CheckpointStore(tmp_path) as store,
        pytest.raises(ArgumentError, match=message),
    ):
        store.save_nowait(snapshot)


def test_a_store_that_is_not_open_does_not_save(tmp_path):
    with pytest.raises(ArgumentError, match="must be open to save"):
        CheckpointStore(tmp_path).save(small_snapshot(1))
