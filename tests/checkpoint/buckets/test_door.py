"""What cannot work is refused before the first step, by one error that names it."""

import socket
import time

import pytest

from replicator.checkpoint.buckets import bucket as bucket_module
from replicator.checkpoint.buckets.mounts import is_mounted_bucket
from replicator.checkpoint.buckets.url import parse_url
from replicator.checkpoint.buckets.writer import BucketWriter
from replicator.errors import ArgumentError, BucketError


@pytest.mark.parametrize(
    "text",
    [
        *("gs://", "gs:///run", "s3://b/run", "s3://Bucket/run", "s3://a_/run"),
        *("s3://bucket//run", "s3://bucket/a/../b", "s3://bucket/./a"),
        *("s3://bucket/run?versionId=3", "gs://bucket/run#7", "gs://bucket/a\nb"),
        *("az://bucket/run", "hdfs://host/run", "https://host/run", "GS://bucket/run"),
        *("file://host/run", "gs:/bucket/run", "s3://bucket/a\\b"),
    ],
)
def test_a_url_that_names_no_folder_of_a_bucket_is_refused(text):
    with pytest.raises(ArgumentError, match="`directory` must be a path, gs://"):
        parse_url("directory", text)


@pytest.mark.parametrize(
    "text", ["gs://bucket", "s3://my.bucket-1/a b/ä", "gs://bucket/run/", "file:///a/b"]
)
def test_a_url_of_a_folder_is_taken(text):
    assert str(parse_url("directory", text)) == text.rstrip("/")


def test_a_key_in_a_url_is_not_in_the_error():
    with pytest.raises(ArgumentError) as raised:
        parse_url("directory", "s3://id:secret@bucket/run")
    assert "secret" not in str(raised.value)


def test_a_bucket_that_is_not_there_is_named(s3, open_bucket):
    s3.disturb = lambda method, path: "404"
    with pytest.raises(BucketError, match=r"`s3://bucket/run\d+` must be in a bucket"):
        open_bucket("s3").require()


def test_a_bucket_of_gcs_that_is_not_there_is_named(gcs, open_bucket):
    gcs.disturb = lambda method, path: "404"  # as an empty one answers to a list
    with pytest.raises(BucketError, match=r"`gs://bucket/run\d+` must be in a bucket"):
        BucketWriter(open_bucket("gs")).acquire(above=0)


def test_a_list_that_gcs_refuses_is_not_an_empty_one(gcs, open_bucket):
    bucket = open_bucket("gs", limit_s=0.3)
    bucket.mark()
    # No right to list, and all others: TensorStore gives an empty list then.
    gcs.disturb = lambda method, path: "403" if "/o?" in path else None
    with pytest.raises(BucketError, match="none is listed"):
        bucket.list("a/")


@pytest.mark.parametrize("status", ["401", "403"])
def test_a_list_of_gcs_with_a_token_that_has_expired_is_asked_for_again(
    gcs, open_bucket, status
):
    bucket = open_bucket("gs")
    bucket.put("a/x", b"1")
    asked = []

    def expired(method, path):
        asked.append(path)
        return status if len(asked) < 3 else None

    gcs.disturb = expired
    assert bucket.list("a/") == ["a/x"]


@pytest.mark.parametrize("kind", ["s3", "gs"], indirect=True)
def test_a_refusal_is_final_at_the_door(request, kind, bucket):
    server = request.getfixturevalue({"s3": "s3", "gs": "gcs"}[kind])
    server.disturb = lambda method, path: "403"
    begun_s = time.monotonic()
    with pytest.raises(BucketError, match="must be open to this process"):
        bucket.require()
    assert time.monotonic() - begun_s < 30  # what may pass is tried again for minutes


def test_the_variable_that_is_missing_is_named(s3, open_bucket, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    s3.disturb = lambda method, path: "403"
    with pytest.raises(BucketError, match=r"`AWS_ACCESS_KEY_ID` is not set"):
        open_bucket("s3").require()


def test_a_server_that_is_silent_is_an_error_within_the_limit(
    s3, open_bucket, monkeypatch
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        with pytest.raises(BucketError, match="must answer, got a list"):
            open_bucket("s3", limit_s=1).require()


def test_a_bucket_is_asked_for_ten_seconds_before_a_run(s3, open_bucket, monkeypatch):
    assert bucket_module._OPENING_S == 10
    monkeypatch.setattr(bucket_module, "_OPENING_S", 0.5)
    bucket = open_bucket("s3")  # whose other requests are repeated for minutes
    s3.disturb = lambda method, path: "503"
    begun_s = time.monotonic()
    with pytest.raises(BucketError, match="failed to the end"):
        bucket.require()
    assert time.monotonic() - begun_s < 60


MOUNTS = """\
/dev/root / ext4 rw 0 0
models /mnt/models fuse.gcsfuse rw,nosuid 0 0
s3fs /mnt/with\\040space fuse.s3fs rw 0 0
tmpfs /mnt/models/local tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "is_bucket"),
    [
        ("/mnt/models/run", True),
        ("/mnt/with space/run", True),
        ("/mnt/models/local/run", False),
        ("/mnt/other", False),
        ("/mnt/models2/run", False),
    ],
)
def test_a_mounted_bucket_is_known_by_the_table_of_mounts(tmp_path, path, is_bucket):
    table = tmp_path / "mounts"
    table.write_text(MOUNTS)
    assert is_mounted_bucket(type(tmp_path)(path), table) == is_bucket
