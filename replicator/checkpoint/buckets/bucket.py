"""A directory of objects in a bucket, or of files: read, list, put, delete.

Every request is repeated while its failures pass. A put whose answer was lost may have
been carried out: it is repeated too, and what then lies there decides.
"""

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from replicator.base.host.clock import Clock
from replicator.checkpoint.buckets.retries import (
    LIMIT_S,
    Failure,
    call_again,
    classify,
)
from replicator.checkpoint.buckets.url import BucketUrl
from replicator.errors import BucketError

_MARKER = ".directory"
_NOTHING_THERE = b"\x02"  # TensorStore's generation of a key without a value
_OPENING_S = 10.0
_DELETIONS = 16  # at once
_BYTES_PER_S = 1 << 20  # slower than this, an attempt is given up
_NOTES = re.compile(r" \[(http_|curl_|source ).*")  # in any order, whole pages of XML
_CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
}


class Bucket:
    """Objects below a URL, by their key from there on.

    >>> here = BucketUrl(scheme="file", bucket="", path=os.getcwd().strip("/"))
    >>> bucket = Bucket(here)
    >>> bucket.put_if_absent("x/y", b"first"), bucket.put_if_absent("x/y", b"second")
    (True, False)
    >>> bucket.list("x/")
    ['x/y']

    Args:
      url: Where the objects are.
      limit_s: Seconds for which a request is repeated.
      answer_s: Longest wait for an answer before it is, in seconds; longer for large
        objects.
      clock: Clock of all times.
    """

    def __init__(
        self,
        url: BucketUrl,
        *,
        limit_s: float = LIMIT_S,
        answer_s: float = 30.0,
        clock: Clock | None = None,
    ):
        self.url = url
        self._limit_s = limit_s
        self._answer_s = answer_s
        self._clock = clock
        self._store: Any = None
        # A server that is silent in the midst of an object ends no wait of TensorStore.
        os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "30")
        os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "100")

    def require(self) -> None:
        """Raise unless the bucket is there and lists its objects, within 10 seconds.

        Raises:
          BucketError: There is none, it refused us, or it did not answer.
        """
        # A refusal is final here: before the first step somebody looks at the error.
        self._call(
            f"list of `{self.url}`",
            lambda store: self._listing(store, "."),
            limit_s=min(_OPENING_S, self._limit_s),
            again=lambda failure: failure == "passing",
        )

    def kvstore(self, prefix: str = "") -> dict[str, Any]:
        """Return TensorStore's spec of the keys that start with `prefix`."""
        return self.url.kvstore(prefix)

    def read(self, key: str) -> bytes | None:
        """Return the content of an object, or None where there is none.

        Raises:
          BucketError: The bucket did not give it within the limit.
        """
        found = self._call(f"read of `{key}`", lambda store: store.read(key))
        return found.value if found.state == "value" else None

    def list(self, prefix: str = "") -> list[str]:
        """Return the keys that start with `prefix`, in order.

        Raises:
          BucketError: The bucket did not give them within the limit.
        """
        what = f"list of `{prefix}`"
        found = self._call(what, lambda store: self._listing(store, prefix))
        keys = sorted(key.decode() for key in found)
        # There are servers that know no ranges, and then give what else they have.
        return [key for key in keys if key.startswith(prefix)]

    def mark(self) -> None:
        """Leave an object here by which an empty list is known from a refused one.

        Raises:
          BucketError: The bucket did not take it within the limit.
        """
        self.put(_MARKER, b"Written by `replicator`.\n")

    def is_marked(self) -> bool:
        """Return whether `mark` was ever called here."""
        return self.read(_MARKER) is not None

    def put(self, key: str, data: bytes) -> None:
        """Write an object, or write it anew.

        Raises:
          BucketError: The bucket did not take it within the limit.
        """
        self._put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object where there is none; return whether it has our content now.

        Args:
          key: Key of the object.
          data: Content that no other writer would write.

        Raises:
          BucketError: The bucket did not take it within the limit.
        """
        if self._put(key, data, if_equal=_NOTHING_THERE):
            return True
        # Ours may lie there: from an attempt whose answer was lost.
        found = self.read(key)
        if found is None:  # 404, which looks like 412 here
            raise self._error(f"put of `{key}`", ValueError("NOT_FOUND: nothing there"))
        return found == data

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is fine.

        Raises:
          BucketError: The bucket did not delete it within the limit.
        """
        self._call(f"deletion of `{key}`", lambda store: store.write(key, None))

    def delete_all(self, prefix: str) -> None:
        """Delete all objects whose keys start with `prefix`.

        Raises:
          BucketError: The bucket did not delete them within the limit.
        """
        with ThreadPoolExecutor(_DELETIONS) as threads:
            list(threads.map(self.delete, self.list(prefix)))

    def _listing(self, store: Any, prefix: str) -> Any:
        # TensorStore takes a list that GCS refuses (401, 403, 404) for an empty one.
        future = store.list(_range(prefix))
        return _CheckedListing(store, future) if self.url.scheme == "gs" else future

    def _put(self, key: str, data: bytes, **condition: bytes) -> bool:
        """Put an object; return False where the condition does not hold."""

        def start(store: Any) -> Any:
            return store.write(key, data, **condition)

        stamp = self._call(f"put of `{key}`", start, nbytes=len(data))
        # 404 and 412 of a put are no errors of TensorStore: it then has no generation.
        if not stamp.generation and not condition:
            raise self._error(f"put of `{key}`", ValueError("it was refused"))
        return bool(stamp.generation)

    def _call(
        self,
        what: str,
        start: Callable[[Any], Any],
        *,
        nbytes: int = 0,
        limit_s: float | None = None,
        again: Callable[[Failure], bool] | None = None,
    ) -> Any:
        limit_s = self._limit_s if limit_s is None else limit_s
        answer_s = min(self._answer_s, limit_s) + nbytes / _BYTES_PER_S

        def call() -> Any:
            future = start(self._open(answer_s))
            try:
                return future.result(timeout=answer_s)
            finally:
                future.cancel()  # does nothing to one that is done

        again = again or self._prepare_again
        try:
            return call_again(call, again=again, limit_s=limit_s, clock=self._clock)
        except (ValueError, TimeoutError) as failure:
            raise self._error(what, failure) from failure

    def _prepare_again(self, failure: Failure) -> bool:
        if failure == "refused":  # credentials of an hour have ended: read them anew
            self._store = None
        return failure in ("passing", "refused")

    def _open(self, answer_s: float) -> Any:
        import tensorstore

        if self._store is None:
            opened = tensorstore.KvStore.open(self.kvstore())
            self._store = opened.result(timeout=answer_s)
        return self._store

    def _error(self, what: str, failure: Exception) -> BucketError:
        kind = classify(failure)
        text = _NOTES.sub("", " ".join(str(failure).split()))[:300] or "no answer"
        if kind == "absent":
            return BucketError(
                f"`{self.url}` must be in a bucket that is there, got none of that "
                f"name ({what}). Make it, or correct the URL."
            )
        if kind == "refused":
            names = _CREDENTIALS.get(self.url.scheme, ())
            unset = [f"`{name}` is not set" for name in names if name not in os.environ]
            return BucketError(
                f"`{self.url}` must be open to this process, got {what} "
                f"refused{' (' + unset[0] + ')' if unset else ''}: {text}. Give it "
                "credentials that may read, list, write and delete there."
            )
        return BucketError(
            f"`{self.url}` must answer, got a {what} that failed to the end: {text}. "
            "Look whether the service and the network are up, then run again."
        )


class _CheckedListing:
    """A list that counts only if an object that is there can be read and listed."""

    def __init__(self, store: Any, listing: Any):
        self._store = store
        self._listing = listing

    def result(self, timeout: float | None = None) -> Any:
        keys = self._listing.result(timeout=timeout)
        marker = self._store.read(_MARKER).result(timeout=timeout)  # raises at 401, 403
        if keys or marker.state != "value":
            return keys
        if not self._store.list(_range(_MARKER)).result(timeout=timeout):
            raise ValueError("PERMISSION_DENIED: objects are there, none is listed")
        return keys

    def cancel(self) -> None:
        self._listing.cancel()


def _range(prefix: str) -> Any:
    import tensorstore

    end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
    return tensorstore.KvStore.KeyRange(prefix, end)
