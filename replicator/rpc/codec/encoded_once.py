"""A value that many callers ask for, encoded when the first of them does."""

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")


class EncodedOnce(Generic[_Value]):
    """A value that is encoded once, however often it is sent and to whomever.

    A handler returns it in place of the value; callers receive the value. What the
    first one cost is kept as long as this object: the bytes, and, for callers on the
    same host, one copy of the arrays, which all of them read in place and none of them
    can write. The value must not be changed afterwards. It is the whole result of a
    method, not a part of one.

    >>> from replicator import rpc
    >>> class Weights:
    ...     def __init__(self):
    ...         self._kept = rpc.EncodedOnce({"w": [1.0, 2.0]})
    ...     def pull(self):
    ...         return self._kept
    >>> with rpc.Server(Weights()) as server, rpc.Client(server.address) as weights:
    ...     weights.pull()
    {'w': [1.0, 2.0]}

    Attributes:
      value: Value to be sent.
      spare: Memory of former values, for transports.
    """

    __slots__ = ("__weakref__", "_kept", "_lock", "spare", "value")

    def __init__(
        self, value: _Value, *, after: "EncodedOnce[Any] | None" = None
    ) -> None:
        """Hold a value; nothing is encoded before it is sent.

        Args:
          value: Anything that a method may return.
          after: A former value for the same callers. Memory of it, and of others after
            it, is used again when nobody sees it any more: new memory costs more than
            the copy.
        """
        self.value = value
        self.spare: list[Any] = [] if after is None else after.spare
        self._kept: dict[Hashable, Any] = {}
        # Held while `make` runs, so that concurrent callers wait for one of them.
        # Reentrant: code that `make` calls may be interrupted by a `__del__`.
        # The first of all locks: callers hold none of a transport's.
        self._lock = threading.RLock()

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make()` from the first call with `key`.

        For the codec and the transports. An error of `make` is raised, and not kept.

        >>> weights = EncodedOnce([1.0])
        >>> weights.kept("bytes", lambda: b"made")
        b'made'
        >>> weights.kept("bytes", lambda: b"again")
        b'made'
        """
        try:
            return self._kept[key]
        except KeyError:
            pass
        with self._lock:
            if key not in self._kept:
                self._kept[key] = make()
            return self._kept[key]
