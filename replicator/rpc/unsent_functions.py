"""Placeholders for functions that are not serialised, filled in by the receiver.

A flax `TrainState` holds `apply_fn` and `tx` beside its arrays. Code is not sent; the
receiver of such a state has the same functions, or needs none of them.
"""

import copy
import dataclasses
from typing import Any, NoReturn, TypeVar

from replicator.base.host.plain_text import plain

_Value = TypeVar("_Value")


@dataclasses.dataclass(frozen=True, slots=True)
class NotSent:
    """Placeholder in a static field for the function that its sender has there.

    Attributes:
      where: Class and name of the field.
    """

    where: str

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error that names the source of the missing function."""
        raise TypeError(self._why())

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._why())

    def _why(self) -> str:
        return (
            f"`{plain(self.where)}` must be taken from a value of your own, got none: "
            "functions do not travel. Write `rpc.fill(received, like=yours)`."
        )


def is_function(value: Any) -> bool:
    """Return whether a value is a function, or a tuple of them, as optimizers are.

    >>> is_function(len), is_function((len, max)), is_function(3)
    (True, True, False)
    """
    is_tuple = isinstance(value, tuple) and len(value) > 0
    return all(map(callable, value)) if is_tuple else callable(value)


def fill(value: _Value, *, like: Any) -> _Value:
    """Return a received value with the functions that were not sent.

    Args:
      value: A result or an argument of a call: a flax `TrainState`, or what holds one.
      like: A value of the same structure, whose functions are taken. Its arrays are
        not looked at.

    Returns:
      The value; what `like` has no place for is as it was.

    >>> state = {"params": 1.0, "apply_fn": len}
    >>> received = {"params": 2.0, "apply_fn": NotSent("state.apply_fn")}
    >>> fill(received, like=state)["apply_fn"]
    <built-in function len>
    """
    if type(value) is NotSent:
        return like
    if type(value) is not type(like):
        return value
    if isinstance(value, dict):
        filled = {
            key: fill(item, like=like.get(key, item)) for key, item in value.items()
        }
        return type(value)(filled)
    if isinstance(value, list | tuple):
        if len(value) != len(like):
            return value
        pairs = zip(value, like, strict=True)
        items = [fill(item, like=other) for item, other in pairs]
        make: Any = getattr(type(value), "_make", type(value))
        return make(items)
    if dataclasses.is_dataclass(value):
        filled = copy.copy(value)
        for field in dataclasses.fields(value):
            item = fill(getattr(value, field.name), like=getattr(like, field.name))
            object.__setattr__(filled, field.name, item)
        return filled
    return value
