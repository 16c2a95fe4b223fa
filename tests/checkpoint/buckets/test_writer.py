"""Of all writers of a bucket the newest one commits, on every kind that fences."""

import pytest

from replicator.checkpoint.buckets.writer import BucketWriter
from replicator.errors import CheckpointInUseError

# The emulator of GCS overwrites where GCS itself refuses.
fencing = pytest.mark.parametrize("kind", ["file", "s3"], indirect=True)


def test_the_first_writer_is_above_all_that_have_committed(bucket):
    assert BucketWriter(bucket).acquire(above=7) == 8


@fencing
def test_a_second_writer_shuts_the_first_one_out(bucket):
    first, second = BucketWriter(bucket), BucketWriter(bucket)
    assert [first.acquire(above=0), second.acquire(above=0)] == [1, 2]
    second.require_current()
    with pytest.raises(CheckpointInUseError, match=r"got process \d+ on .* after it"):
        first.require_current()


@fencing
def test_a_third_writer_shuts_the_first_one_out(bucket):
    writers = [BucketWriter(bucket) for _ in range(3)]
    for writer in writers:
        writer.acquire(above=0)
    for old in writers[:2]:
        with pytest.raises(CheckpointInUseError):
            old.require_current()
    writers[2].require_current()


@fencing
def test_a_directory_made_anew_is_not_written_to(bucket):
    first, second = BucketWriter(bucket), BucketWriter(bucket)
    first.acquire(above=0)
    bucket.delete_all("")
    second.acquire(above=0)
    with pytest.raises(CheckpointInUseError):
        first.require_current()


def test_a_stale_list_gives_no_generation_twice(s3, open_bucket):
    bucket = open_bucket("s3")
    bucket.list(".writer/")
    first, second = BucketWriter(bucket), BucketWriter(bucket)
    s3.disturb = lambda method, path: "stale" if "list-type" in path else None
    assert [first.acquire(above=0), second.acquire(above=0)] == [1, 2]
    with pytest.raises(CheckpointInUseError):
        first.require_current()


@pytest.mark.parametrize("fault", ["lost", "409", "503"])
def test_a_disturbed_writer_is_one_writer(s3, open_bucket, fault):
    bucket, seen = open_bucket("s3"), set()

    def once(method, path):
        if method == "PUT" and path not in seen:
            seen.add(path)
            return fault

    s3.disturb = once
    writer = BucketWriter(bucket)
    assert writer.acquire(above=0) == 1
    writer.require_current()
