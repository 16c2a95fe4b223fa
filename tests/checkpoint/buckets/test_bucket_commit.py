"""A checkpoint in a bucket is whole or absent, whenever its writer dies."""

import contextlib
import itertools
import json

import pytest

from replicator.checkpoint.buckets import commit
from replicator.errors import CheckpointInUseError

fencing = pytest.mark.parametrize("kind", ["file", "s3"], indirect=True)


class Died(Exception):
    """Stands for a process that ends between two requests."""


def manifest_of(state, **more):
    files = [{"path": f"{state}/0/c.0"}, {"path": f"{state}/zarr.json"}]
    return json.dumps({"files": files, **more}).encode()


def save(bucket, step, state, *, generation=1, **more):
    """Save a state of two objects."""
    intent = commit.begin(bucket, step, state, generation=generation)
    for name in ("zarr.json", "0/c.0"):
        bucket.put(f"{step:012d}/{state}/{name}", b"1")
    manifest = manifest_of(state, **more)
    commit.publish(bucket, intent, manifest)


def whole_steps(bucket):
    """Return the state of each step, all of whose objects are there."""
    found = {}
    for step in commit.list_steps(bucket):
        files = json.loads(bucket.read(commit.manifest_key(step)))["files"]
        there = bucket.list(f"{step:012d}/")
        assert {f"{step:012d}/{file['path']}" for file in files} <= {*there}
        found[step] = files[0]["path"].split("/")[0]
    return found


def test_a_saved_step_is_there_and_nothing_else(bucket):
    save(bucket, 7, "state-00000001")
    assert whole_steps(bucket) == {7: "state-00000001"}
    assert len(bucket.list()) == 4


def test_a_step_saved_again_is_the_new_one_alone(bucket):
    save(bucket, 7, "state-00000001")
    save(bucket, 7, "state-00000002", generation=2)
    assert whole_steps(bucket) == {7: "state-00000002"}
    assert len(bucket.list()) == 4


def test_a_deleted_step_leaves_nothing(bucket):
    save(bucket, 7, "state-00000001")
    commit.delete(bucket, 7, generation=1)
    commit.delete(bucket, 7, generation=1)
    assert bucket.list() == [".newest"]


def test_an_abandoned_save_leaves_nothing(bucket):
    intent = commit.begin(bucket, 7, "state-00000001", generation=1)
    bucket.put("000000000007/state-00000001/zarr.json", b"1")
    commit.abandon(bucket, intent)
    assert bucket.list() == []


@fencing
def test_a_manifest_of_another_is_not_overwritten(bucket, monkeypatch):
    intent = commit.begin(bucket, 7, "state-00000001", generation=1)
    read = bucket.read

    def late(key):  # another one's manifest comes after the look
        found = read(key)
        monkeypatch.setattr(bucket, "read", read)
        bucket.put(key, manifest_of("state-00000002"))
        return found

    monkeypatch.setattr(bucket, "read", late)
    with pytest.raises(CheckpointInUseError, match="another has put there meanwhile"):
        commit.publish(bucket, intent, manifest_of("state-00000001"))
    assert b"state-00000002" in bucket.read(commit.manifest_key(7))


@contextlib.contextmanager
def die_before(monkeypatch, bucket, number):
    """Let a process die before its change of that number."""
    count = itertools.count()
    with monkeypatch.context() as patch:
        for name in ("put", "put_if_absent", "delete"):
            change = getattr(bucket, name)

            def counted(*arguments, change=change):
                if next(count) == number:
                    raise Died
                return change(*arguments)

            patch.setattr(bucket, name, counted)
        yield


@pytest.mark.parametrize("number", range(10))
def test_a_kill_between_any_two_requests_leaves_one_of_the_two(
    open_bucket, monkeypatch, number
):
    bucket = open_bucket("file")
    save(bucket, 7, "state-00000001")
    with die_before(monkeypatch, bucket, number), contextlib.suppress(Died):
        save(bucket, 7, "state-00000002", generation=2)
    commit.sweep(bucket, generation=3)
    assert whole_steps(bucket)[7] in ("state-00000001", "state-00000002")
    assert len(bucket.list()) == 4


@pytest.mark.parametrize("number", range(5))
def test_a_kill_in_a_deletion_leaves_all_or_nothing(open_bucket, monkeypatch, number):
    bucket = open_bucket("file")
    save(bucket, 7, "state-00000001")
    with die_before(monkeypatch, bucket, number), contextlib.suppress(Died):
        commit.delete(bucket, 7, generation=1)
    commit.sweep(bucket, generation=2)
    assert len(bucket.list()) == (4 if whole_steps(bucket) else 1)


def test_a_sweep_is_of_older_writers_alone(bucket):
    commit.begin(bucket, 7, "state-00000001", generation=2)
    bucket.put("000000000007/state-00000001/zarr.json", b"1")
    commit.sweep(bucket, generation=2)
    assert bucket.list("000000000007/")
    assert commit.sweep(bucket, generation=3) == ["000000000007/state-00000001"]
    assert bucket.list() == []


def test_no_sweep_takes_a_copy_whose_manifest_may_still_come(open_bucket, bucket):
    """Plain tools copy a directory in any order, intents of a save that runs too."""
    save(bucket, 7, "state-00000001")
    commit.begin(bucket, 8, "state-00000002", generation=1)
    bucket.put("000000000008/state-00000002/zarr.json", b"1")
    copy = open_bucket("file")
    copy.url = type(copy.url)(scheme="file", bucket="", path=copy.url.path + "-copy")
    for key in reversed(bucket.list()):
        if not key.endswith("manifest.json"):
            copy.put(key, bucket.read(key))
    there = copy.list()
    commit.sweep(copy, generation=9)
    assert copy.list() == there


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lost", "409", "503", "cut", "stale"])
def test_a_disturbed_save_is_whole(s3, open_bucket, fault):
    bucket, seen = open_bucket("s3"), set()
    bucket.list()
    save(bucket, 7, "state-00000001")

    def once(method, path):
        if (method, path) not in seen or fault == "stale":
            seen.add((method, path))
            return fault if fault != "stale" or "list-type" in path else None

    s3.disturb = once
    save(bucket, 7, "state-00000002", generation=2)
    s3.disturb = lambda method, path: None
    assert whole_steps(bucket) == {7: "state-00000002"}
