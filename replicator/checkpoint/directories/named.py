"""Directories of checkpoints by path or URL."""

import os
from pathlib import Path
from typing import TypeAlias, overload

from replicator.base.host.paths import checked_path
from replicator.checkpoint.buckets.bucket import Bucket
from replicator.checkpoint.buckets.mounts import is_mounted_bucket
from replicator.checkpoint.buckets.retries import LIMIT_S
from replicator.checkpoint.buckets.url import BucketUrl, is_bucket_url, parse_url
from replicator.checkpoint.directories.in_bucket import BucketDirectory
from replicator.checkpoint.directories.on_disk import DiskDirectory
from replicator.checkpoint.disk import Disk

Directory: TypeAlias = DiskDirectory | BucketDirectory


@overload
def checked_directory(name: str, value: None) -> None: ...
@overload
def checked_directory(name: str, value: str | os.PathLike[str]) -> Path | str: ...
def checked_directory(
    name: str, value: str | os.PathLike[str] | None
) -> Path | str | None:
    """Return the argument `name` as an absolute path or the URL of a bucket.

    >>> checked_directory("checkpoint_dir", "gs://models/run/")
    'gs://models/run'

    Raises:
      ArgumentError: It is neither None nor a path, or a URL that names no bucket.
    """
    if isinstance(value, str) and is_bucket_url(value):
        return str(parse_url(name, value))
    return checked_path(name, value)


def open_directory(
    directory: Path | str, disk: Disk | None = None, *, limit_s: float = LIMIT_S
) -> Directory:
    """Return the directory of checkpoints at a path or URL, from `checked_directory`.

    >>> str(open_directory("s3://models/run"))
    's3://models/run'

    Args:
      directory: Path or URL.
      disk: The file system.
      limit_s: Seconds for which a request to a bucket is repeated.
    """
    if isinstance(directory, str):
        url = parse_url("directory", directory)
        return BucketDirectory(Bucket(url, limit_s=limit_s))
    if is_mounted_bucket(directory):
        path = str(directory).strip("/")
        return BucketDirectory(Bucket(BucketUrl(scheme="file", bucket="", path=path)))
    return DiskDirectory(directory, disk)
