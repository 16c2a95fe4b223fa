"""A store in a bucket does what one on a disk does."""

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.runs.faulty_buckets import BUCKET
from replicator.checkpoint.copies.keeper import VARIABLE, serve_keeper
from replicator.checkpoint.retention import Retention
from replicator.checkpoint.snapshot import Snapshot
from replicator.checkpoint.store import CheckpointStore
from replicator.errors import BucketError, CheckpointError, CheckpointInUseError


def state(step):
    """A state with a leaf of several shards, small ones and a random key."""
    return {
        "w": jnp.arange(40_000, dtype=jnp.float32).reshape(200, 200) + step,
        "b": jnp.full((3,), step, jnp.bfloat16),
        "key": jax.random.key(step),
    }


def save(store, *steps):
    for step in steps:
        meta = {"at": step}
        store.save(Snapshot(step=step, arrays=state(step), meta=meta))


def is_state(restored, step):
    """Whether a checkpoint holds the bits of a step."""
    found, wanted = restored.arrays, state(step)
    return restored.step == step and all(
        np.array_equal(jax.random.key_data(a) if name == "key" else a, b)
        for name, a, b in (
            (name, found[name], jax.random.key_data(v) if name == "key" else v)
            for name, v in wanted.items()
        )
    )


@pytest.fixture
def url(bucket):
    """A directory of each kind."""
    return str(bucket.url)


def test_a_saved_state_comes_back_bit_for_bit(url):
    with CheckpointStore(url) as store:
        assert store.restore() is None
        save(store, 1, 2)
        restored = store.restore(state(0))
    assert is_state(restored, 2)
    assert restored.meta == {"at": 2}
    assert CheckpointStore(url).steps() == (1, 2)


@pytest.mark.parametrize("kind", ["file", "s3"], indirect=True)
def test_the_same_step_saved_again_is_the_new_one(url):
    with CheckpointStore(url) as store:
        save(store, 1)
        store.save(Snapshot(step=1, arrays=state(5)))
        assert np.array_equal(store.restore().arrays["w"], state(5)["w"])


@pytest.mark.parametrize("kind", ["file", "s3"], indirect=True)
def test_retention_deletes_all_of_a_step(bucket, url):
    with CheckpointStore(url, retention=Retention(keep_last=1)) as store:
        save(store, 1, 2, 3)
        assert store.steps() == (3,)
    keys = [key for key in bucket.list() if not key.startswith(".")]
    assert {key.split("/")[0] for key in keys} == {"000000000003"}
    assert bucket.list(".intents/") == []


@pytest.mark.parametrize("kind", ["file", "s3"], indirect=True)
def test_a_run_that_goes_back_discards_later_steps(url):
    with CheckpointStore(url) as store:
        save(store, 1, 2, 3)
        assert store.discard_after(1) == (2, 3)
        assert store.steps() == (1,)


@pytest.mark.parametrize("kind", ["file", "s3"], indirect=True)
def test_a_second_writer_takes_over(url):
    with CheckpointStore(url) as first, CheckpointStore(url) as second:
        save(second, 1)
        with pytest.raises(CheckpointInUseError, match="must have this run as its"):
            save(first, 2)
        assert second.steps() == (1,)


def objects(bucket):
    """Keys of the shards and metadata of the newest step."""
    folder = max(key.split("/")[0] for key in bucket.list() if key[0].isdigit())
    return [key for key in bucket.list(f"{folder}/")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3"], indirect=True)
def test_each_damaged_object_is_found_and_the_step_before_is_read(bucket, url):
    with CheckpointStore(url) as store:
        save(store, 1, 2)
        for number, key in enumerate(objects(bucket)):
            content = bucket.read(key)
            flipped = bytearray(content)
            flipped[len(content) // 2] ^= 1
            damage = (bytes(flipped), content[:-1], None)[number % 3]
            bucket.delete(key) if damage is None else bucket.put(key, damage)
            assert is_state(store.restore(), 1), key
            bucket.put(key, content)
        assert is_state(store.restore(), 2)


@pytest.mark.parametrize("kind", ["file", "s3"], indirect=True)
def test_a_bucket_that_holds_other_things_is_refused(bucket, url):
    bucket.put("notes/a.txt", b"1")
    with pytest.raises(CheckpointError, match=r"must hold nothing else, .*notes"):
        CheckpointStore(url).open()


@pytest.mark.parametrize("kind", ["file", "s3"], indirect=True)
def test_an_empty_bucket_is_not_one_of_checkpoints(url):
    with pytest.raises(CheckpointError, match="which has no checkpoint"):
        CheckpointStore(url).restore()


ORDERS = [sorted, lambda keys: sorted(keys, reverse=True)]


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_copy_by_plain_tools_is_the_same_checkpoint(bucket, url, tmp_path, order):
    with CheckpointStore(url) as store:
        save(store, 1, 2)
    copy = tmp_path / "copy"
    for key in order([key for key in bucket.list() if not key.startswith(".")]):
        path = copy / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bucket.read(key))
    assert is_state(CheckpointStore(copy).restore(state(0)), 2)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_copy_that_a_writer_opens_half_way_is_not_swept(bucket, url, tmp_path, order):
    with CheckpointStore(tmp_path / "disk") as store:
        save(store, 1, 2)
    root = tmp_path / "disk"
    files = order(path for path in root.rglob("*") if path.is_file())
    for number, path in enumerate(files):
        content = path.read_bytes() or b" "  # the emulator takes no empty object
        bucket.put(path.relative_to(root).as_posix(), content)
        if number % 5 == 2:  # a run that begins here meanwhile
            with CheckpointStore(url) as store, contextlib.suppress(CheckpointError):
                store.restore()
    assert is_state(CheckpointStore(url).restore(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["503", "lost", "cut"])
def test_a_disturbed_store_saves_and_restores_the_same_bits(s3, fault):
    url, seen = f"s3://{BUCKET}/disturbed-{fault}", set()

    def once_each(method, path):
        if (method, path) not in seen:
            seen.add((method, path))
            return fault

    s3.disturb = once_each
    with CheckpointStore(url) as store:
        save(store, 1, 2)
        assert is_state(store.restore(state(0)), 2)


def test_an_outage_is_not_taken_for_damage(s3, monkeypatch):
    monkeypatch.setattr("replicator.checkpoint.pieces.stored_state.LIMIT_S", 0.1)
    url = f"s3://{BUCKET}/outage"
    with CheckpointStore(url) as store:
        save(store, 1, 2)
        s3.disturb = lambda method, path: "403" if "/c." in path else None
        with pytest.raises(BucketError, match="must be readable"):
            store.restore()
        s3.disturb = lambda method, path: None
        assert is_state(store.restore(), 2)


def test_a_mounted_bucket_is_committed_by_its_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "replicator.checkpoint.directories.named.is_mounted_bucket", lambda path: True
    )
    with CheckpointStore(tmp_path / "run") as store:
        save(store, 1, 2)
        assert is_state(store.restore(), 2)
    assert (tmp_path / "run" / ".writer").is_dir()
    assert Path(tmp_path / "run" / "000000000002" / "manifest.json").exists()


def test_copies_in_memory_go_to_the_next_writer_and_to_no_other(
    url, tmp_path, monkeypatch
):
    (tmp_path / "launcher").mkdir(mode=0o700)
    with serve_keeper(tmp_path / "launcher") as variables:
        monkeypatch.setenv(VARIABLE, variables[VARIABLE])
        with CheckpointStore(url, copies=True) as store:
            save(store, 1)
            assert store.copies.save_nowait(Snapshot(step=5, arrays=state(5)))
        with CheckpointStore(url, copies=True) as store:
            restored = store.restore(state(0))
        assert restored.source == "memory"
        assert is_state(restored, 5)
        CheckpointStore(url).open().close()  # it copies nothing
        with CheckpointStore(url, copies=True) as store:
            assert is_state(store.restore(state(0)), 1)
