"""What a method takes of who calls it over the network: types, sizes and counts.

Each method of the library that a network can call says it, in one place:

    @accepts(actor=text(), count=whole(1))
    def take(self, actor, count): ...

All arguments are held against it before any of them is walked, copied, kept or shown.
Of a class of the library, servers offer the methods that say it, and no others.
"""

import functools
import inspect
import numbers
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from replicator.errors import ArgumentError

MAX_NAME = 256
"""Characters in the name of a method, an actor, a variable."""
_MAX_ARRAY_BYTES = 1 << 30
_SHOWN = 64
_MARK = "__accepts__"

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Rule(NamedTuple):
    """What one argument must be.

    Attributes:
      must_be: In words: "a list of at most 3 numbers".
      is_right: Whether a value is; takes little time and memory, whatever it is given.
      remedy: What the caller is to do.
    """

    must_be: str
    is_right: Callable[[Any], bool]
    remedy: str = "Pass one that is."


def text(most: int = MAX_NAME) -> Rule:
    """Return the rule of a string of so many characters."""
    return Rule(
        f"a string of at most {most} characters",
        lambda value: isinstance(value, str) and len(value) <= most,
    )


def blob(most: int) -> Rule:
    """Return the rule of so many bytes."""
    return Rule(
        f"bytes, at most {most} of them",
        lambda value: isinstance(value, bytes) and len(value) <= most,
    )


def whole(least: int = 0, most: int = (1 << 63) - 1) -> Rule:
    """Return the rule of a whole number, of Python or of NumPy."""

    def is_right(value: Any) -> bool:
        is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        return is_whole and least <= int(value) <= most

    return Rule(f"a whole number from {least} to {most}", is_right)


def seconds() -> Rule:
    """Return the rule of a time that can be waited for."""
    return Rule(
        "a number of seconds, 0 or more",
        lambda value: is_number(value) and 0 <= value <= threading.TIMEOUT_MAX,
    )


def items(kind: str, is_right: Callable[[Any], bool], most: int) -> Rule:
    """Return the rule of a list or tuple: of no range, whose items would be made."""
    return Rule(
        f"a list of at most {most} {kind}",
        lambda value: (
            isinstance(value, list | tuple)
            and len(value) <= most
            and all(map(is_right, value))
        ),
    )


def texts(most: int) -> Rule:
    """Return the rule of a list of names."""
    return items("names", text().is_right, most)


def array(kind: str, most: int) -> Rule:
    """Return the rule of an array of one axis, and of a kind of NumPy's dtypes."""
    return Rule(
        f"an array of one axis, at most {most} long, of the kind {kind!r}",
        lambda value: (
            is_array(value)
            and value.ndim == 1
            and len(value) <= most
            and value.dtype.kind == kind
        ),
    )


def plain(most: int, *, most_text: int) -> Rule:
    """Return the rule of numbers, text and bytes, in lists and dictionaries."""

    def is_right(value: Any) -> bool:
        left, left_text, waiting = most, most_text, [value]
        while waiting and left >= 0 and left_text >= 0:
            one = waiting.pop()
            if isinstance(one, list | tuple | dict):
                left -= len(one)
                if left >= 0:  # so its items may be looked at
                    waiting += one
                    waiting += one.values() if isinstance(one, dict) else ()
            elif isinstance(one, str | bytes):
                left_text -= len(one)
            elif isinstance(one, int):
                left_text -= one.bit_length() // 8
            elif one is not None and not isinstance(one, float):
                return False
        return left >= 0 and left_text >= 0

    return Rule(f"at most {most} plain values of {most_text} characters", is_right)


def is_number(value: Any) -> bool:
    """Tell numbers that a float can hold; NaN is one."""
    is_huge = isinstance(value, int) and value.bit_length() > 1023
    return isinstance(value, numbers.Real) and not is_huge


def is_array(value: Any) -> bool:
    """Tell arrays, of NumPy or JAX, that are no larger than a message may be.

    An axis without elements counts as one of one, and an element without bytes as one
    byte: otherwise axes could be as long as a number can say.
    """
    jax_array = getattr(sys.modules.get("jax"), "Array", ())
    if not isinstance(value, (np.ndarray, np.generic, jax_array)):
        return False
    size = max(value.dtype.itemsize, 1)
    for length in value.shape:
        size *= max(length, 1)
    return size <= _MAX_ARRAY_BYTES


def accepts(
    error: type[Exception] = ArgumentError, whose: str | None = None, /, **rules: Rule
) -> Callable[[_Method], _Method]:
    """Say what a method takes, by the name of each of its parameters.

    A parameter's default is always right. What `*args` or `**kwargs` take has one rule,
    of the tuple or of the dictionary.

    Args:
      error: What the method raises where an argument is not as its rule says.
      whose: The argument that is the name of the caller, for the error.
      **rules: Of all parameters but the first.

    Returns:
      A decorator.

    Raises:
      ArgumentError: A parameter has no rule, or a rule no parameter.

    >>> class Store:
    ...     @accepts(key=text(8))
    ...     def read(self, key):
    ...         return key
    >>> Store().read(key="a")
    'a'
    """

    def described(method: _Method) -> _Method:
        signature = inspect.signature(method)
        _, *names = signature.parameters
        if set(names) != set(rules):
            raise ArgumentError(
                f"`rules` must be of {', '.join(names)}, got {', '.join(rules)} for "
                f"`{method.__name__}`. Say what each parameter takes."
            )
        defaults = {name: signature.parameters[name].default for name in names}
        # Who calls comes first: what names it in an error must be a name.
        ordered = sorted(rules.items(), key=lambda item: item[0] != whose)

        @functools.wraps(method)
        def checked(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            # What no parameter takes is refused by Python, unread.
            given = signature.bind(self, *args, **kwargs).arguments
            for name, rule in ordered:
                value = given.get(name, defaults[name])
                if value is not defaults[name] and not rule.is_right(value):
                    of = f" of {given[whose]}" if whose and name != whose else ""
                    raise error(
                        f"`{name}`{of} must be {rule.must_be}, got {shown(value)}. "
                        f"{rule.remedy}"
                    )
            return method(self, *args, **kwargs)

        setattr(checked, _MARK, rules)
        return checked  # type: ignore[return-value]

    return described


def accepted_by(method: object) -> Mapping[str, Rule] | None:
    """Return what a method says that it takes; None if it says nothing."""
    return getattr(method, _MARK, None)


def shown(value: Any) -> str:
    """Write what arrived in few words: not all that arrives can be shown."""
    is_short = isinstance(value, str | bytes) and len(value) <= _SHOWN
    is_short |= isinstance(value, int) and value.bit_length() <= 64
    if value is None or is_short or isinstance(value, float):
        return repr(value)
    if isinstance(value, str | bytes | list | tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
