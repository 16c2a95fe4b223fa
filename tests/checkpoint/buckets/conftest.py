"""Buckets of each kind, empty, on real servers of this host."""

import itertools

import pytest

from benchmarks.runs import faulty_buckets
from replicator.checkpoint.buckets.bucket import Bucket
from replicator.checkpoint.buckets.url import parse_url

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_server():
    pytest.importorskip("moto")
    with faulty_buckets.serving_s3() as proxy:
        yield proxy


@pytest.fixture(scope="session")
def gcs_server():
    pytest.importorskip("gcp_storage_emulator")
    with faulty_buckets.serving_gcs() as proxy:
        yield proxy


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The proxy before an S3 that this process takes for its own."""
    s3_server.disturb = lambda method, path: None
    s3_server.requests.clear()
    for name, value in faulty_buckets.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    return s3_server


@pytest.fixture
def gcs(gcs_server, monkeypatch):
    """The proxy before a GCS that this process takes for its own."""
    gcs_server.disturb = lambda method, path: None
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", gcs_server.url)
    return gcs_server


@pytest.fixture
def open_bucket(tmp_path):
    """Opens the same directory of a kind again and again."""
    name = f"run{next(_numbers)}"
    places = {
        "file": f"file://{tmp_path}/{name}",
        "s3": f"s3://{faulty_buckets.BUCKET}/{name}",
        "gs": f"gs://{faulty_buckets.BUCKET}/{name}",
    }

    def open_one(kind, **limits):
        return Bucket(parse_url("directory", places[kind]), **limits)

    return open_one


@pytest.fixture(params=["file", "s3", "gs"])
def kind(request):
    if request.param != "file":
        request.getfixturevalue({"s3": "s3", "gs": "gcs"}[request.param])
    return request.param


@pytest.fixture
def bucket(kind, open_bucket):
    return open_bucket(kind)
