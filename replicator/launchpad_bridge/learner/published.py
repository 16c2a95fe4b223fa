"""Variables that a learner publishes and any number of actors pull.

    learner     publish(version, values)     copies nothing and encodes nothing
    handlers    get(names, ...)              the first caller of a version, and of a set
                                             of names, has it encoded for all of them

One lock guards the kept versions. No thread encodes, sends or calls anything else under
it: so `publish` waits for look-ups of handlers, and never for a caller.
"""

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from replicator import rpc
from replicator.base.accepts import accepts, seconds, texts, whole
from replicator.base.types import PyTree
from replicator.errors import ArgumentError, ReplicatorError, check_count, check_whole
from replicator.launchpad_bridge.trajectories.handler_wait import wait_for

_MOST_NAMES = 4_096
_MOST_SETS = 16  # of names, that are kept encoded for a version
GET = accepts(
    names=texts(_MOST_NAMES), newer_than=whole(), version=whole(), timeout_s=seconds()
)
"""Argument rules of `get`."""


@rpc.register
class VariablesError(ReplicatorError, LookupError):
    """The variables are not published, or no longer kept."""


@rpc.register
class VariablesTimeoutError(ReplicatorError, TimeoutError):
    """Variables were not published within the deadline of a call; call again."""


@rpc.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Variables:
    """Variables that a learner has published.

    Attributes:
      version: Number of updates behind them.
      values: A pytree of arrays by name; the arrays are read-only.
    """

    version: int
    values: dict[str, PyTree]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Version:
    """One version, and its replies, encoded once for each set of names."""

    version: int
    values: dict[str, PyTree]
    replies: dict[tuple[str, ...], rpc.EncodedOnce[Variables]]


class PublishedVariables:
    """Holds the newest versions of a learner's variables; any thread may call.

    >>> published = PublishedVariables()
    >>> published.publish(3, {"policy": {"w": np.ones(2)}, "value": np.zeros(3)})
    >>> published.get(["value"], timeout_s=1.0)
    Variables(version=3, values={'value': array([0., 0., 0.])})
    >>> published.get(newer_than=3, timeout_s=1.0) is None
    True
    """

    def __init__(self, *, keep: int = 1) -> None:
        """Start with none.

        Args:
          keep: Number of versions to keep, the newest ones.

        Raises:
          ArgumentError: `keep` is less than 1.
        """
        check_count("keep", keep)
        self._keep = keep
        # Guards `_kept` and its `replies`; notified when a version is published.
        self._changed = threading.Condition()
        self._kept: dict[int, _Version] = {}  # oldest first
        # All versions go to the same callers, and use the memory of former ones again.
        self._first = rpc.EncodedOnce(None)

    @property
    def version(self) -> int | None:
        """Return the newest version; None before the first."""
        with self._changed:
            return next(reversed(self._kept), None)

    def wait_for(self, version: int, timeout_s: float) -> bool:
        """Wait until a version, or a later one, is published; return whether it is."""
        with self._changed:
            return wait_for(
                self._changed, lambda: self._is_reached(version), timeout_s=timeout_s
            )

    def publish(self, version: int, values: Mapping[str, PyTree]) -> None:
        """Publish a version to all later calls; the oldest one may be dropped.

        One that is not above the version before, of a learner that went back to its
        checkpoint, replaces all from there on.

        Args:
          version: Number of updates behind it.
          values: A pytree of arrays by name, of NumPy or of one device. They are not
            copied, and must not be written to or donated afterwards. The first caller
            waits until those of a device are computed.

        Raises:
          ArgumentError: `version` is not a whole number, or `values` are not by name.
        """
        check_whole("version", version)
        published = _Version(int(version), _read_only(values), {})
        with self._changed:
            for other in [*self._kept]:
                if other >= published.version:
                    del self._kept[other]
            self._kept[published.version] = published
            while len(self._kept) > self._keep:
                del self._kept[next(iter(self._kept))]
            self._changed.notify_all()

    @GET
    def get(
        self,
        names: Sequence[str] | None = None,
        *,
        newer_than: int | None = None,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> Variables | None:
        """Return published variables, in a handler such that they are encoded once.

        Waits for a version that is not published yet, and for the first one; not for
        one that differs from `newer_than`. In a handler the wait takes a thread of the
        server, and ends with its call: shortly before the deadline, or when the caller
        is gone or the server stops. There the result is an `rpc.EncodedOnce`, to be
        returned as it is: the handler's caller receives `Variables`.

        Args:
          names: Names of the values; all by default.
          newer_than: Version that the caller has; the result is None if it is the
            newest.
          version: Version to return; the newest by default.
          timeout_s: Longest wait; None for the rest of the call, or a minute.

        Returns:
          The variables. None if the caller has them, or they were not published within
          `timeout_s`, or the caller no longer waits.

        Raises:
          ArgumentError: Both `newer_than` and `version` are given, or `names` is not a
            list of names.
          VariablesError: The version is no longer kept, or a name is not among those
            that are published.
          VariablesTimeoutError: The call's deadline came before `timeout_s`.
        """
        if newer_than is not None and version is not None:
            raise ArgumentError(
                f"`newer_than` must not be given with a `version`, got {newer_than} "
                f"and {version}. Give one of them."
            )
        with self._changed:
            if not self._waited(version, timeout_s):
                return None
            found = self._found(version)
            if newer_than is not None and found.version == newer_than:
                return None
            reply = _reply(found, names, after=self._first)
        # A direct call, not by a server, has no use for the wrapper. It is encoded when
        # it is sent, by the thread of the first call that returns it.
        return reply.value if rpc.current_call() is None else cast("Variables", reply)

    def _waited(self, version: int | None, timeout_s: float | None) -> bool:
        """Wait with the lock held; return False if waiting longer is of no use."""
        started_s = time.monotonic()
        if wait_for(
            self._changed, lambda: self._is_reached(version), timeout_s=timeout_s
        ):
            return True
        waited_s = time.monotonic() - started_s
        is_over = timeout_s is not None and waited_s >= timeout_s
        if is_over or rpc.cancelled():
            return False
        awaited = "the first version" if version is None else f"version {version}"
        newest = next(reversed(self._kept), None)
        raise VariablesTimeoutError(
            f"{awaited} of the variables was not published within {waited_s:.3g} s; "
            f"the newest is {newest}. Call again, with a longer deadline."
        )

    def _is_reached(self, version: int | None) -> bool:
        newest = next(reversed(self._kept), None)
        return newest is not None and (version is None or version <= newest)

    def _found(self, version: int | None) -> _Version:
        if version is None:
            return self._kept[next(reversed(self._kept))]
        if version not in self._kept:
            raise VariablesError(
                f"`version` must be one that is kept, got {version}; kept are "
                f"{', '.join(map(str, self._kept))}. Give the learner's `fixed_lag` "
                "the value of the table's `lag`."
            )
        return self._kept[version]


def _reply(
    found: _Version, names: Sequence[str] | None, *, after: rpc.EncodedOnce
) -> rpc.EncodedOnce[Variables]:
    """Return the reply that callers of these names share; the first one makes it."""
    asked = {*found.values} if names is None else {*names}
    if unknown := sorted(asked - found.values.keys()):
        published = ", ".join(map(repr, found.values))
        raise VariablesError(
            f"`names` must be of published variables, got {unknown[0]!r}; published "
            f"are {published}. Use these."
        )
    key = tuple(name for name in found.values if name in asked)
    if key in found.replies:
        return found.replies[key]
    values = {name: found.values[name] for name in key}
    variables = Variables(version=found.version, values=values)
    reply = rpc.EncodedOnce(variables, after=after)
    # Many variables have more sets of names than there is memory for; the set of all
    # names, which actors use, is kept in any case.
    if names is None or len(found.replies) < _MOST_SETS:
        found.replies[key] = reply
    return reply


def _read_only(values: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Return the same arrays as views that callers in this process cannot write."""
    if not isinstance(values, Mapping) or not all(isinstance(k, str) for k in values):
        raise ArgumentError(
            "`values` must be pytrees by name, got "
            f"{type(values).__name__}. Pass a dictionary, {{'policy': params}}."
        )
    return {n: jax.tree.map(_read_only_leaf, value) for n, value in values.items()}


def _read_only_leaf(leaf: Any) -> Any:
    if type(leaf) is not np.ndarray:
        return leaf
    view = leaf.view()
    view.flags.writeable = False
    return view
