"""Rules for arguments of methods called over the network: types, sizes and counts.

Each method of the library that can be called over a network declares them:

    @accepts(actor=text(), count=whole(1))
    def take(self, actor, count): ...

All arguments are checked before any of them is walked, copied, kept or shown. Servers
offer only those methods of the library's classes that declare rules.
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


class ArgumentRule(NamedTuple):
    """Rule for one argument.

    Attributes:
      must_be: The rule as text: "a list of at most 3 numbers".
      is_right: Returns whether a value obeys it, in little time and memory for any
        value.
      remedy: Advice for the caller.
    """

    must_be: str
    is_right: Callable[[Any], bool]
    remedy: str = "Pass one that is."


def text(most: int = MAX_NAME) -> ArgumentRule:
    """Return the rule for a string of at most `most` characters.

    >>> text(3).is_right("abc"), text(3).is_right("abcd")
    (True, False)
    """
    return ArgumentRule(
        f"a string of at most {most} characters",
        lambda value: isinstance(value, str) and len(value) <= most,
    )


def blob(most: int) -> ArgumentRule:
    """Return the rule for at most `most` bytes.

    >>> blob(3).is_right(b"abcd")
    False
    """
    return ArgumentRule(
        f"bytes, at most {most} of them",
        lambda value: isinstance(value, bytes) and len(value) <= most,
    )


def whole(least: int = 0, most: int = (1 << 63) - 1) -> ArgumentRule:
    """Return the rule for a whole number, of Python or of NumPy.

    >>> whole(1).is_right(0)
    False
    """

    def is_right(value: Any) -> bool:
        is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        return is_whole and least <= int(value) <= most

    return ArgumentRule(f"a whole number from {least} to {most}", is_right)


def seconds() -> ArgumentRule:
    """Return the rule for a number of seconds that can be waited for.

    >>> seconds().is_right(float("nan"))
    False
    """
    return ArgumentRule(
        "a number of seconds, 0 or more",
        lambda value: is_number(value) and 0 <= value <= threading.TIMEOUT_MAX,
    )


def items(kind: str, is_right: Callable[[Any], bool], most: int) -> ArgumentRule:
    """Return the rule for a list or tuple, not a range, whose items would be made.

    >>> items("numbers", is_number, 2).is_right([1.0, 2])
    True
    """
    return ArgumentRule(
        f"a list of at most {most} {kind}",
        lambda value: (
            isinstance(value, list | tuple)
            and len(value) <= most
            and all(map(is_right, value))
        ),
    )


def texts(most: int) -> ArgumentRule:
    """Return the rule for a list of at most `most` names.

    >>> texts(2).is_right(["loss", "step"])
    True
    """
    return items("names", text().is_right, most)


def array(kind: str, most: int) -> ArgumentRule:
    """Return the rule for an array of one axis, and of a kind of NumPy's dtypes.

    >>> array("i", 8).is_right(np.arange(3))
    True
    """
    return ArgumentRule(
        f"an array of one axis, at most {most} long, of the kind {kind!r}",
        lambda value: (
            is_array(value)
            and value.ndim == 1
            and len(value) <= most
            and value.dtype.kind == kind
        ),
    )


def plain(most: int, *, most_text: int) -> ArgumentRule:
    """Return the rule for numbers, text and bytes, in lists and dictionaries.

    >>> plain(4, most_text=100).is_right({"step": 3, "names": ["a", "b"]})
    True
    """

    def is_right(value: Any) -> bool:
        left, left_text, waiting = most, most_text, [value]
        while waiting and left >= 0 and left_text >= 0:
            one = waiting.pop()
            if isinstance(one, list | tuple | dict):
                left -= len(one)
                if left >= 0:  # few enough items to walk
                    waiting += one
                    waiting += one.values() if isinstance(one, dict) else ()
            elif isinstance(one, str | bytes):
                left_text -= len(one)
            elif isinstance(one, int):
                left_text -= one.bit_length() // 8
            elif one is not None and not isinstance(one, float):
                return False
        return left >= 0 and left_text >= 0

    return ArgumentRule(
        f"at most {most} plain values of {most_text} characters", is_right
    )


def is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold; NaN is one.

    >>> is_number(3), is_number(10**400)
    (True, False)
    """
    is_huge = isinstance(value, int) and value.bit_length() > 1023
    return isinstance(value, numbers.Real) and not is_huge


def is_array(value: Any) -> bool:
    """Return whether a value is a NumPy or JAX array within the size of a message.

    An axis without elements counts as one of one, and an element without bytes as one
    byte: otherwise axes could have any length.

    >>> is_array(np.zeros(3)), is_array([0, 0, 0])
    (True, False)
    """
    jax_array = getattr(sys.modules.get("jax"), "Array", ())
    if not isinstance(value, (np.ndarray, np.generic, jax_array)):
        return False
    size = max(value.dtype.itemsize, 1)
    for length in value.shape:
        size *= max(length, 1)
    return size <= _MAX_ARRAY_BYTES


def accepts(
    error: type[Exception] = ArgumentError,
    whose: str | None = None,
    /,
    **rules: ArgumentRule,
) -> Callable[[_Method], _Method]:
    """Declare the rule for each parameter of a method, by its name.

    A parameter's default is always accepted. `*args` and `**kwargs` have one rule each,
    for the tuple or the dictionary.

    Args:
      error: Error that the method raises if an argument breaks its rule.
      whose: Argument that holds the name of the caller, for the error.
      **rules: Rules for all parameters but the first.

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
        kinds = {each.kind for each in signature.parameters.values()}
        is_plain = kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
        if set(names) != set(rules):
            raise ArgumentError(
                f"`rules` must be of {', '.join(names)}, got {', '.join(rules)} for "
                f"`{method.__name__}`. Give each parameter a rule."
            )
        defaults = {name: signature.parameters[name].default for name in names}
        # The caller's name is checked first, as errors contain it.
        ordered = sorted(rules.items(), key=lambda item: item[0] != whose)

        @functools.wraps(method)
        def checked(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_plain and not kwargs and len(args) == len(names):
                given = dict(zip(names, args, strict=True))  # at a tenth of the price
            else:  # Python refuses arguments without a parameter, unread
                given = signature.bind(self, *args, **kwargs).arguments
            for name, rule in ordered:
                value = given.get(name, defaults[name])
                if value is not defaults[name] and not rule.is_right(value):
                    caller = f" of {given[whose]}" if whose and name != whose else ""
                    raise error(
                        f"`{name}`{caller} must be {rule.must_be}, got {shown(value)}. "
                        f"{rule.remedy}"
                    )
            return method(self, *args, **kwargs)

        setattr(checked, _MARK, rules)
        return checked  # type: ignore[return-value]

    return described


def accepted_by(method: object) -> Mapping[str, ArgumentRule] | None:
    """Return the rules that a method declares; None if it declares none.

    >>> accepted_by(len) is None
    True
    """
    return getattr(method, _MARK, None)


def shown(value: Any) -> str:
    """Return a short text for a received value, which may be too large to show.

    >>> shown([0] * 100)
    'list of 100'
    """
    is_short = isinstance(value, str | bytes) and len(value) <= _SHOWN
    is_short |= isinstance(value, int) and value.bit_length() <= 64
    if value is None or is_short or isinstance(value, float):
        return repr(value)
    if isinstance(value, str | bytes | list | tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
