"""`Deferred`: an argument that is made where the node runs, not where it is written.

An object that cannot be pickled, or must not be shared (an environment, a connection, a
jitted function), is made in the node itself:

    program.add_node(lp.CourierNode(Actor, lp.Deferred(make_environment, "pong")))
"""

import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from replicator.errors import LaunchError
from replicator.launchpad_bridge.handles import Arguments, Composite, dereferenced
from replicator.launchpad_bridge.running import node_context

Made = TypeVar("Made")
_STACK_FRAMES = 12


class _Nowhere:
    """Key for "no node" among the workers that an object was made for."""


_NOWHERE = _Nowhere()


class Deferred(Composite[Made], Generic[Made]):
    """Calls a constructor where a node starts, once for each worker.

    Handles, and other `Deferred`, among its arguments are dereferenced. Nodes of one
    worker (a `MultiThreadingColocation`) share the object; other workers make their
    own, under threads as under processes.

    >>> Deferred(int, "7").dereference()
    7
    """

    def __init__(self, constructor: Callable[..., Made], *args: Any, **kwargs: Any):
        """Store the call; `dereference` makes it.

        Args:
          constructor: Returns the object.
          *args: Arguments of the constructor.
          **kwargs: Named arguments of the constructor.
        """
        self._constructor = constructor
        self._args = args
        self._kwargs = kwargs
        self._init_stack = "".join(traceback.format_stack(limit=_STACK_FRAMES)[:-1])
        self._forget()

    @property
    def constructor(self) -> Callable[..., Made]:
        """Return the class or function that makes the object."""
        return self._constructor

    @property
    def arguments(self) -> Arguments:
        """Return the arguments, which may hold handles."""
        return (self._args, self._kwargs)

    def dereference(self) -> Made:
        """Return the object; make it if this worker has not yet.

        Raises:
          LaunchError: The constructor raised; shows where the `Deferred` was written.
        """
        context = node_context.current()
        maker: object = _NOWHERE if context is None else context.root
        with self._lock:
            if maker not in self._made:
                self._made[maker] = self._construct()
            return self._made[maker]

    def _construct(self) -> Made:
        args, kwargs = dereferenced((self._args, self._kwargs))
        try:
            return self._constructor(*args, **kwargs)
        except Exception as error:
            raise LaunchError(
                f"Error ({error}) occurred when evaluating Deferred defined at:\n"
                f"{self._init_stack}"
            ) from error

    def _forget(self) -> None:
        # Held while the constructor runs: other threads of the worker wait for its
        # object, and so do other workers that are threads of this process.
        self._lock = threading.RLock()
        self._made: weakref.WeakKeyDictionary[object, Made] = (
            weakref.WeakKeyDictionary()
        )

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_made")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()
