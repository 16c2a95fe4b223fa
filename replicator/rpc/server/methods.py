"""Methods that a server offers: the public ones that the classes of an object declare.

They are found in the classes, not in the object: no property is evaluated, nothing of
`object` is offered, nothing that begins with an underscore but a `__call__` that a
class defines, and no path of attributes leads anywhere. A class of this library offers
only the methods that declare the arguments they accept (`base/accepts`).
"""

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from replicator.base.accepts import accepted_by
from replicator.errors import ArgumentError, check_not_async
from replicator.rpc.call_statistics import CallRecords

QUICK_S = 50e-6
"""A method that mostly takes less runs in the thread that read the call. One that takes
more gains more from running beside others than a switch of threads costs."""
_CALLS_AT_FIRST = 4
_CALLS_AFTER_HOLD_UP = 64
_MARK = "__rpc_idempotent__"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def idempotent(function: _Function) -> _Function:
    """Mark a method that may run more than once for one call.

    When the connection breaks or the reply is lost, the client makes the call again,
    with back-off, within the deadline: the method runs at least once. Calls of other
    methods run at most once; the client raises `ConnectionLostError` instead.

    Args:
      function: A method, or a function given to `Server.bind`.

    Returns:
      The same, marked.

    Raises:
      ArgumentError: It bears no mark, as builtins do not.

    >>> class Store:
    ...     @idempotent
    ...     def read(self, key): ...
    """
    try:
        setattr(function, _MARK, True)
    except (AttributeError, TypeError):
        raise ArgumentError(
            f"`function` must be one written in Python, got {function!r}. Wrap it in "
            "a `def`."
        ) from None
    return function


class Method:
    """One method of a server: its function, and how quick its calls have been.

    Attributes:
      is_quick: Whether the next call runs in the thread that read it. A guess from the
        last calls; a wrong one costs others 2 ms (`read_handoff`), and then 64 calls
        run in the pool before the next guess.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], *, is_idempotent: bool = False
    ) -> None:
        check_not_async(name, function)
        self.name = name
        self.function = function
        self.is_idempotent = is_idempotent
        # A batched handler waits in its callers' threads until enough of them came.
        batch_size = getattr(function, "batch_size", None)
        self.batch_size = batch_size if isinstance(batch_size, int) else 1
        self.is_quick = False
        self.records = CallRecords()
        # Written by any thread without a lock: an update that is lost among others
        # makes the guess a little worse, no more.
        self._share_of_slow = 0.0
        self._calls_until_quick = _CALLS_AT_FIRST

    def took(self, seconds: float) -> None:
        """Learn from a call; quick ones need not be reported while `is_quick`."""
        was_quick = self.is_quick
        self._share_of_slow += ((seconds > QUICK_S) - self._share_of_slow) / 8
        self._calls_until_quick -= 1
        self.is_quick = (
            self._calls_until_quick <= 0
            and self._share_of_slow < 0.5
            and self.batch_size == 1
        )
        if self.is_quick and not was_quick:
            self._share_of_slow = 0.0  # quick calls are no longer reported

    def held_up(self) -> None:
        """Learn that a call which was thought quick held others up."""
        self._calls_until_quick = _CALLS_AFTER_HOLD_UP
        self.is_quick = False


def methods_of(instance: object) -> dict[str, Method]:
    """Return the methods that an object offers, by name.

    Args:
      instance: Any object. A function that its constructor put in place of a declared
        method (`self.predict = batched_handler(32)(self.predict)`) is called instead.

    Raises:
      ArgumentError: It is a class, or declares no public method, or an `async def`.

    >>> class Store:
    ...     @idempotent
    ...     def read(self, key): ...
    >>> {name: method.is_idempotent for name, method in methods_of(Store()).items()}
    {'read': True}
    """
    if isinstance(instance, type):
        raise ArgumentError(
            f"`instance` must be an object, got the class {instance.__name__}. "
            f"Write `Server({instance.__name__}(...))`."
        )
    found = {
        name: Method(
            name, getattr(instance, name), is_idempotent=_is_marked(instance, name)
        )
        for name in declared_names(type(instance))
    }
    if not found:
        raise ArgumentError(
            f"`instance` must declare a public method, got {type(instance).__name__} "
            "without one. Names with an underscore stay private."
        )
    return found


def method_of_function(name: str, function: Callable[..., Any]) -> Method:
    """Return a method made of a single function.

    Raises:
      ArgumentError: The name is private or not a name; the function cannot be called,
        or is an `async def`.

    >>> method_of_function("_add", max)
    Traceback (most recent call last):
    ...
    replicator.errors.ArgumentError: `name` must be a public Python name, got '_add'.
    Use letters, digits and underscores, and begin with a letter.
    """
    if name != "__call__" and (name.startswith("_") or not name.isidentifier()):
        raise ArgumentError(
            f"`name` must be a public Python name, got {name!r}. Use letters, digits "
            "and underscores, and begin with a letter."
        )
    if not callable(function):
        raise ArgumentError(
            f"`function` must be callable, got {type(function).__name__} for {name!r}."
        )
    return Method(name, function, is_idempotent=getattr(function, _MARK, False))


def is_offered(cls: type, name: str) -> bool:
    """Return whether a class is not of this library, or declares what a method takes.

    >>> class Counter:
    ...     def add(self, n): ...
    >>> is_offered(Counter, "add")
    True
    """
    owner = next((each for each in cls.__mro__ if name in vars(each)), None)
    if owner is None or not owner.__module__.startswith("replicator."):
        return True
    return accepted_by(vars(owner)[name]) is not None


def declared_names(cls: type) -> Iterator[str]:
    """Yield the names of the public methods that a class declares.

    >>> class Counter:
    ...     total = 0
    ...     def add(self, n): ...
    ...     def _reset(self): ...
    >>> list(declared_names(Counter))
    ['add']
    """
    seen: set[str] = set()
    for ancestor in cls.__mro__[:-1]:
        for name, attribute in vars(ancestor).items():
            if name in seen:
                continue
            seen.add(name)  # a class that hides a method hides it here too
            is_public = name == "__call__" or not name.startswith("_")
            if is_public and is_offered(cls, name) and _is_method(attribute):
                yield name


def _is_method(attribute: object) -> bool:
    """Return whether it is a function, or wraps one (`functools.wraps`, `jax.jit`)."""
    if isinstance(attribute, types.FunctionType | staticmethod | classmethod):
        return True
    if isinstance(attribute, type) or not callable(attribute):
        return False
    return isinstance(inspect.unwrap(attribute), types.FunctionType)


def _is_marked(instance: object, name: str) -> bool:
    declared = inspect.getattr_static(type(instance), name)
    return getattr(declared, _MARK, False) or (
        getattr(getattr(declared, "__func__", None), _MARK, False)
    )
