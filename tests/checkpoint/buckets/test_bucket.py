"""One law for files, S3 and GCS: what was put is there, once, or an error names it."""

import itertools
import threading

import pytest

from replicator.errors import BucketError

KEYS = ["a/b", "a/b/c", "a-b", "ab", "a b+c%2F=ä"]


@pytest.mark.parametrize("key", KEYS)
def test_what_was_put_is_read(bucket, key):
    bucket.put(key, b"\x00\xffcontent")
    assert bucket.read(key) == b"\x00\xffcontent"


def test_what_was_put_twice_is_the_last(bucket):
    bucket.put("a", b"first")
    bucket.put("a", b"second")
    assert bucket.read("a") == b"second"


def test_an_absent_object_is_none(bucket):
    bucket.require()
    assert bucket.read("a") is None


def test_a_folder_is_listed_without_its_namesakes(bucket):
    for key in ("a/x", "a/y/z", "ab", "a-b", "b"):
        bucket.put(key, b"1")
    assert bucket.list("a/") == ["a/x", "a/y/z"]
    assert len(bucket.list()) == 5


def test_deleted_objects_are_gone_and_only_they(bucket):
    for key in ("a/x", "a/y/z", "ab", "b"):
        bucket.put(key, b"1")
    bucket.delete_all("a/")
    bucket.delete("b")
    bucket.delete("never")
    assert bucket.list() == ["ab"]


@pytest.mark.parametrize("kind", ["file", "s3"], indirect=True)
def test_the_second_put_if_absent_loses(bucket):
    assert bucket.put_if_absent("a", b"ours")
    assert not bucket.put_if_absent("a", b"another's")
    assert bucket.read("a") == b"ours"


def test_putting_our_own_bytes_again_is_success(bucket):
    assert bucket.put_if_absent("a", b"ours")
    assert bucket.put_if_absent("a", b"ours")


@pytest.mark.parametrize("kind", ["file", "s3"], indirect=True)
def test_of_many_puts_at_once_one_wins(bucket):
    won = []

    def put(name):
        if bucket.put_if_absent("a", name):
            won.append(name)

    threads = [threading.Thread(target=put, args=(b"%d" % n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [bucket.read("a")]


def test_a_put_that_waits_between_its_look_and_its_write_does_not_overwrite(
    s3, open_bucket
):
    # TensorStore asks with a HEAD before it puts: the put itself has to be conditional.
    bucket, other = open_bucket("s3"), open_bucket("s3")

    def first(method, path):
        if method == "PUT" and path.endswith("/a"):
            s3.disturb = lambda method, path: None
            other.put("a", b"another's")

    s3.disturb = first
    assert not bucket.put_if_absent("a", b"ours")
    assert bucket.read("a") == b"another's"


def few_times(fault, count, methods):
    """Disturb the first requests of some methods."""
    left = itertools.count()
    return lambda method, path: (
        fault if method in methods and next(left) < count else None
    )


def once_each(fault):
    """Disturb each request when it comes for the first time."""
    seen = set()

    def disturb(method, path):
        request = method, path.split("tensorstore=")[0]  # GCS: random, for caches
        if request not in seen:
            seen.add(request)
            return fault

    return disturb


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["400", "409", "429", "500", "503", "lost", "cut"])
def test_faults_that_pass_are_not_seen(s3, open_bucket, fault):
    bucket = open_bucket("s3")
    s3.disturb = once_each(fault)
    bucket.put("a/x", b"1" * 1000)
    assert bucket.put_if_absent("a/y", b"2" * 1000)
    assert bucket.read("a/x") == b"1" * 1000
    assert bucket.list("a/") == ["a/x", "a/y"]
    bucket.delete("a/x")
    assert bucket.list("a/") == ["a/y"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["429", "503", "lost", "cut", "400", "409"])
def test_faults_of_gcs_that_pass_are_not_seen(gcs, open_bucket, fault):
    bucket = open_bucket("gs")
    gcs.disturb = once_each(fault)
    bucket.put("a/x", b"1" * 1000)
    assert bucket.read("a/x") == b"1" * 1000
    assert bucket.list() == ["a/x"]


def test_silence_is_waited_for_once(s3, open_bucket):
    bucket = open_bucket("s3", answer_s=0.3)
    s3.disturb = few_times("silence", 1, ("PUT",))
    bucket.put("a", b"1")
    s3.disturb = few_times("silence", 1, ("GET",))
    assert bucket.read("a") == b"1"


def test_a_put_whose_answer_was_lost_is_success(s3, open_bucket):
    bucket = open_bucket("s3")
    s3.disturb = few_times("lost", 1, ("PUT",))
    assert bucket.put_if_absent("a", b"ours")
    assert bucket.read("a") == b"ours"


@pytest.mark.parametrize("fault", ["500", "503", "429", "409", "412"])
def test_a_put_that_fails_to_the_end_is_an_error(s3, open_bucket, fault):
    bucket = open_bucket("s3", limit_s=0.3)
    s3.disturb = lambda method, path: fault if method == "PUT" else None
    with pytest.raises(BucketError, match="put of `a`"):
        bucket.put("a", b"1")


@pytest.mark.parametrize("fault", ["500", "503", "409"])
def test_a_put_if_absent_that_fails_to_the_end_is_an_error(s3, open_bucket, fault):
    bucket = open_bucket("s3", limit_s=0.3)
    s3.disturb = lambda method, path: fault if method == "PUT" else None
    with pytest.raises(BucketError, match="put of `a`"):
        bucket.put_if_absent("a", b"1")


def test_a_bucket_that_is_gone_is_an_error(s3, open_bucket):
    bucket = open_bucket("s3", limit_s=0.3)
    s3.disturb = lambda method, path: "404"
    for put in (bucket.put, bucket.put_if_absent):
        with pytest.raises(BucketError, match=r"must be in a bucket that is there"):
            put("a", b"1")


def test_an_object_is_put_by_one_request(s3, open_bucket):
    open_bucket("s3").put("a", bytes(20_000_000))
    assert [method for method, _ in s3.requests] == ["PUT"]
