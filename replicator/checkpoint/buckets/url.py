"""URLs of checkpoints in buckets: `gs://bucket/path`, `s3://bucket/path`, `file:///path`."""

import dataclasses
import os
import re
from typing import Any

from replicator.errors import ArgumentError

_URL = re.compile(r"(gs|s3|file)://([^/]*)(?:/(.*))?", re.DOTALL)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# `?` and `#` are parts of keys, but in a URL somebody meant something else by them.
_SEGMENT = re.compile(r"(?!\.\.?$)[^/?#\\\x00-\x1f\x7f]+")
# TensorStore repeats single requests; `retries` repeats what they are requests of.
_AGAIN = {"max_retries": 6, "initial_delay": "50ms", "max_delay": "2s"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BucketUrl:
    """Place of a directory in a bucket, or in a file system.

    Attributes:
      scheme: `gs`, `s3` or `file`.
      bucket: Name of the bucket; empty for `file`.
      path: Path in it, without slashes at its ends; may be empty.
    """

    scheme: str
    bucket: str
    path: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.path}".rstrip("/")

    def kvstore(self, prefix: str = "") -> dict[str, Any]:
        """Return TensorStore's spec of the keys that start with `path` and `prefix`.

        >>> parse_url("directory", "s3://models/run").kvstore("7/")["path"]
        'run/7/'
        """
        path = f"{self.path}/{prefix}" if self.path else prefix
        match self.scheme:
            case "file":
                return {"driver": "file", "path": f"/{path}"}
            case "gs":
                where = {"driver": "gcs", "gcs_request_retries": _AGAIN}
            case _:
                where = {"driver": "s3", "s3_request_retries": _AGAIN, **_endpoint()}
        return {**where, "bucket": self.bucket, "path": path}


def is_bucket_url(text: str) -> bool:
    """Return whether a text is meant as the URL of a directory in a bucket.

    >>> is_bucket_url("gs://models"), is_bucket_url("runs/gs")
    (True, False)
    """
    return text.startswith(("gs://", "s3://", "file://"))


def parse_url(name: str, text: str) -> BucketUrl:
    """Return the parts of a URL.

    >>> str(parse_url("directory", "gs://models/run/"))
    'gs://models/run'

    Args:
      name: Name of the argument, for errors.
      text: URL.

    Raises:
      ArgumentError: It has another scheme, or a name that no bucket has.
    """
    found = _URL.fullmatch(text)
    scheme, bucket, path = found.groups(default="") if found else ("", "", "")
    path = path.strip("/") if scheme == "file" else path.removesuffix("/")
    parts = path.split("/") if path else []
    named = not bucket if scheme == "file" else _BUCKET.fullmatch(bucket)
    if not named or not all(map(_SEGMENT.fullmatch, parts)):
        # A key before `@` is not for logs.
        shown = repr(text) if "@" not in text else "one with `@` in it"
        raise ArgumentError(
            f"`{name}` must be a path, gs://bucket/path or s3://bucket/path, got "
            f"{shown}. Name the bucket and plain folders in it, no keys or options."
        )
    return BucketUrl(scheme=scheme, bucket=bucket, path=path)


def _endpoint() -> dict[str, str]:
    """Return where the S3 of others than Amazon is, as its own tools find it."""
    url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not url:
        return {}  # the bucket's own region is asked for, and may be another than ours
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return {"endpoint": url, "aws_region": region or "us-east-1"}
