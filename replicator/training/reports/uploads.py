"""Copies of a run's records in a bucket: fetched when it begins, put by a thread.

The run writes to a folder of this host, as it writes to any directory. Objects are
whole files: those that have changed are put every ten seconds, before each commit of a
checkpoint, and at the end. What a bucket does not take holds up nothing but that commit
and that end, for some seconds.

The newest run has the right to write, as with checkpoints (`buckets/writer.py`). The
token of that right is kept in the folder, too: a run that finds there the token of the
writer before it has the newest records already, those of the last seconds before a
kill as well; any other run empties the folder, and fetches.
"""

import hashlib
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from replicator.base.host.clock import SystemClock
from replicator.base.host.paths import user_cache
from replicator.checkpoint.buckets.bucket import Bucket
from replicator.checkpoint.buckets.url import BucketUrl
from replicator.checkpoint.buckets.writer import BucketWriter
from replicator.errors import BucketError, CheckpointInUseError
from replicator.hooks.protocol import Hook
from replicator.monitoring.run_record import RECORD_NAME

LOCK_STEM = ".records"
_EVERY_S = 10.0
_WAIT_S = 10.0  # of a save for its records
_END_S = 60.0
_LIMIT_S = 20.0  # for which a request is repeated
_MOST_SHARE = 20  # a round takes at most one part in so many of the time
_TOKEN = ".uploaded_by"
_EARLIER = re.compile(r"earlier/\d+/")
_log = logging.getLogger(__name__)


class Uploads:
    """The records of one process of a run, in a folder here and in a bucket.

    Args:
      url: Directory in the bucket.
      process: Index of the process. The first has the right to write, for all.

    Attributes:
      folder: Folder of this host that the run writes to.
    """

    def __init__(self, url: BucketUrl, *, process: int):
        self.url = url
        name = hashlib.sha256(f"{url}".encode()).hexdigest()[:16]
        self.folder = user_cache() / "records" / name / f"{process}"
        self._process = process
        self._bucket = Bucket(url, limit_s=_LIMIT_S)
        self._writer: BucketWriter | None = None
        # Of each file in the bucket, size and time of the content that it has there.
        # Of the thread alone while that runs; of `fetch` before it, `close` behind it.
        self._put: dict[Path, tuple[int, int]] = {}
        # Guards all below; the thread waits on it, and who waits for a round.
        self._turn = threading.Condition()
        self._asked = self._served = 0
        self._fails = False  # the last round did
        self._closing = False
        self._is_logged = False
        self._thread: threading.Thread | None = None

    def acquire(self) -> tuple[str, str]:
        """Take the right to write; return the tokens of the writer before, and of this.

        Raises:
          BucketError: The bucket is not there, refused us, or did not answer.
        """
        self._bucket.require()
        self._writer = BucketWriter(self._bucket, folder=f"{LOCK_STEM}/")
        self._writer.acquire(above=0)
        return self._writer.tokens

    def fetch(self, before: str, own: str) -> None:
        """Make the folder what the bucket has, unless it is newer.

        Args:
          before: Token of the writer before.
          own: Token of this one.

        Raises:
          BucketError: The bucket did not answer.
          OSError: The folder cannot be written to.
        """
        self.folder.chmod(0o700)  # the journal has made it; nothing is in it yet
        self._put, token = {}, self.folder / _TOKEN
        if not before or not token.exists() or token.read_text() != before:
            self._clear()
            for key in self._keys_to_fetch():
                if (path := download(self._bucket, key, self.folder)) is not None:
                    self._put[path] = _stamp(path)
        token.write_text(own)

    def start(self) -> Self:
        """Begin to upload."""
        self._asked = self._served = 0
        self._fails = self._closing = self._is_logged = False
        self._thread = threading.Thread(
            target=self._run, name="replicator-uploads", daemon=True
        )
        self._thread.start()
        return self

    def flush(self) -> None:
        """Wait until what was written is in the bucket, unless it does not answer."""
        with self._turn:
            if self._fails or self._closing:
                return
            self._asked += 1
            wanted = self._asked
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._served >= wanted, _WAIT_S)

    def close(self) -> None:
        """Upload what is left, and log what could not be."""
        assert self._thread is not None, "called after `start`"
        with self._turn:
            self._closing = True
            self._turn.notify_all()
        self._thread.join(_END_S)
        late = self._thread.is_alive()
        if left := [path for path in self._files() if late or self._has_changed(path)]:
            _log.warning(
                "%d files of records are not in %s as they are in %s. The next run "
                "on this host uploads them, unless another host writes there before.",
                *(len(left), self.url, self.folder),
            )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _run(self) -> None:
        clock, pause_s, closing = SystemClock(), _EVERY_S, False
        while not closing:
            with self._turn:
                self._turn.wait_for(
                    lambda: self._closing or self._asked > self._served, pause_s
                )
                asked, closing = self._asked, self._closing
            begun_s = clock.now_s()
            fails = not self._succeeds(self._put_changed)
            pause_s = max(_EVERY_S, _MOST_SHARE * (clock.now_s() - begun_s))
            with self._turn:
                self._served, self._fails = asked, fails
                self._turn.notify_all()

    def _succeeds(self, round_of_puts: Callable[[], None]) -> bool:
        try:
            round_of_puts()
        except (BucketError, CheckpointInUseError, OSError) as failure:
            if not self._is_logged:
                self._is_logged = True
                _log.warning("Records stay here, and the run goes on: %s", failure)
            return False
        return True

    def _put_changed(self) -> None:
        if self._writer is not None:
            self._writer.require_current()
        for path in self._files():
            if not self._has_changed(path):
                continue
            try:
                # Before it is read: a line that comes meanwhile is put the next time.
                stamp = _stamp(path)
                content = path.read_bytes()
            except FileNotFoundError:  # set aside meanwhile
                continue
            self._bucket.put(path.relative_to(self.folder).as_posix(), content)
            self._put[path] = stamp

    def _files(self) -> Iterator[Path]:
        """Yield the files of the run; names with a dot are locks, drafts and tokens."""
        for path in sorted(self.folder.rglob("*")):
            parts = path.relative_to(self.folder).parts
            if path.is_file() and not any(part.startswith(".") for part in parts):
                yield path

    def _has_changed(self, path: Path) -> bool:
        try:
            return self._put.get(path) != _stamp(path)
        except FileNotFoundError:
            return False

    def _keys_to_fetch(self) -> list[str]:
        if self._process > 0:
            return [f"events.{self._process}.jsonl"]
        # Runs that were set aside have numbers: the next one takes another.
        for key in self._bucket.list("earlier/"):
            if found := _EARLIER.match(key):
                (self.folder / found[0]).mkdir(parents=True, exist_ok=True)
        return ["run.json", "metrics.jsonl", "events.jsonl"]

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif not path.name.startswith(LOCK_STEM):
                path.unlink()


class UploadRecords(Hook):
    """Upload records before a checkpoint is committed; behind the hooks that write.

    Args:
      uploads: Uploads of the run.
    """

    def __init__(self, uploads: Uploads):
        self._uploads = uploads

    def flush(self) -> None:
        """Return when what was written is in the bucket, or after some seconds."""
        self._uploads.flush()


def download(bucket: Bucket, key: str, folder: Path) -> Path | None:
    """Write an object into a folder, and return its path; None if there is none.

    Raises:
      BucketError: The bucket did not give it within its limit.
      OSError: It cannot be written.
    """
    content, path = bucket.read(key), folder / key
    if content is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def download_run(url: BucketUrl, folder: Path) -> None:
    """Fetch what a report of a run needs: all its records but traces and batches.

    Raises:
      BucketError: The bucket is not there, refused us, or did not answer.
      OSError: The folder cannot be written to.
    """
    bucket = Bucket(url, limit_s=_LIMIT_S)
    bucket.require()
    keys = [RECORD_NAME, "metrics.jsonl"]
    for prefix in ("events", "stacks/", "earlier/"):
        keys += bucket.list(prefix)
    for key in keys:
        download(bucket, key, folder)


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
