"""Folders that are buckets in truth: mounted by gcsfuse or s3fs.

There a rename of a folder copies object after object, so a checkpoint that is named by
a rename could be seen half. Such folders get the commit of a bucket.
"""

import re
from pathlib import Path

_KINDS = ("fuse.gcsfuse", "fuse.s3fs")
_OCTAL = re.compile(r"\\([0-7]{3})")


def is_mounted_bucket(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Return whether a path lies on a bucket, by the table of mounts.

    >>> is_mounted_bucket(Path("/proc"))
    False
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return False
    kinds = {}
    for line in lines:
        _, folder, kind, *_ = line.split(" ")
        # Spaces in names are written as octal numbers; a later mount hides an earlier.
        kinds[Path(_OCTAL.sub(lambda found: chr(int(found[1], 8)), folder))] = kind
    here = path.resolve()
    return next(
        (kinds[above] in _KINDS for above in (here, *here.parents) if above in kinds),
        False,
    )
