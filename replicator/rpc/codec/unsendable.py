"""Find the part of a value that cannot be sent, after a failure to send it.

Sending keeps no account of where it is in a value, so that it is fast; when something
fails, the value is walked a second time, with every leaf tried alone.
"""

import dataclasses
import enum
import io
import reprlib
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from replicator.errors import EncodeError, MessageTooLargeError
from replicator.rpc.codec.encoded_once import EncodedOnce
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import Registry

_BUILTINS = (bool, int, float, complex, str, bytes, list, dict, set, frozenset)
_LEVEL = "\0"
_LONGEST_PATH = 300
_LONGEST_TEXT = 500


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A part of a value, how it is reached, and what it lies in."""

    value: Any
    path: str
    within: "_Place | None" = None

    def lies_in_itself(self) -> bool:
        place = self.within
        while place is not None and place.value is not self.value:
            place = place.within
        return place is not None


def find_unsendable(
    value: Any,
    *,
    registry: Registry,
    limits: MessageLimits,
    send: Callable[[Any], object],
) -> Exception:
    """Return the error for the first part that cannot be sent.

    Args:
      value: Value that could not be sent.
      registry: Classes whose instances are looked into.
      limits: Limits of the nesting.
      send: Raises if a leaf cannot be sent.
    """
    places = [_Place(value, "value")]
    while places:
        place = places.pop()
        children = _children(place, registry)
        if children is None:
            try:
                send(place.value)
            except Exception as error:
                return _refused(place, error)
            continue
        if place.lies_in_itself():
            return _error(place, "what lies in itself. Send a copy without the circle")
        if place.path.count(_LEVEL) >= limits.depth:
            return MessageTooLargeError(
                f"A value must be at most {limits.depth} containers deep "
                f"(`MessageLimits.depth`), got `{_shown(place)}`. Flatten it."
            )
        places += reversed(children)
    return EncodeError(
        "`value` must stay as it is while it is sent, and did not. Send a copy."
    )


def why_not(value: Any) -> str:
    """Describe a value of a type that cannot be sent, and a remedy.

    >>> why_not(len)
    'a builtin_function_or_method. Send what it returns'
    """
    name = _name(type(value))
    if isinstance(value, type):
        return f"the class {_name(value)}. Send its name"
    if isinstance(value, types.ModuleType):
        return f"the module {value.__name__}. Send its name"
    if isinstance(value, EncodedOnce):
        return f"an {name} within another value. Return it alone, or send its `value`"
    if isinstance(value, np.ma.MaskedArray):
        return f"a {name}. Send its data and its mask"
    if isinstance(value, np.ndarray):
        return f"a {name}, which is more than an array. Send `np.asarray` of it"
    if isinstance(value, io.IOBase):
        return f"an open file ({name}). Send what is in it, or its path"
    if isinstance(value, BaseException):
        return f"an exception ({name}). Raise it, or send its text"
    if isinstance(value, enum.Enum) or dataclasses.is_dataclass(value):
        return f"a {name}, which is not registered. Register it with `rpc.register`"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (
            f"a {name}, which is not registered. Register it with `rpc.register`, or "
            "send `tuple` of it"
        )
    for kind in _BUILTINS:
        if isinstance(value, kind):
            return f"a {name}. Send `{kind.__name__}` of it"
    if hasattr(value, "__array__"):
        return f"a {name}. Send `np.asarray` of it"
    if callable(value):
        return f"a {name}. Send what it returns"
    if isinstance(value, Iterator) or hasattr(value, "__iter__"):
        return f"a {name}. Send `list` of it"
    return (
        f"a {name}. Make its class a dataclass and register it with `rpc.register`, or "
        "send its numbers and arrays"
    )


def short_text(error: BaseException) -> str:
    """Return the text of an error, which may be long, or fail.

    >>> short_text(ValueError("no such row"))
    'ValueError: no such row'
    """
    name = type(error).__name__
    try:
        return f"{name}: {error}"[:_LONGEST_TEXT]
    except Exception:
        return name


def _children(place: _Place, registry: Registry) -> list[_Place] | None:
    """Return what a container holds; None: it is a leaf."""
    value, kind = place.value, type(place.value)
    if kind in (list, tuple):
        return [_below(place, f"[{i}]", item) for i, item in enumerate(value)]
    if kind in (set, frozenset):
        return [_below(place, f"{{{reprlib.repr(item)}}}", item) for item in value]
    if kind in (dict, OrderedDict):
        keys = [_below(place, f"[key {reprlib.repr(key)}]", key) for key in value]
        return keys + [
            _below(place, f"[{reprlib.repr(key)}]", value[key]) for key in value
        ]
    entry = registry.entry_of(kind)
    if entry is not None and entry.fields and _has_all(value, entry.fields):
        return [_below(place, f".{name}", part) for name, part in entry.parts(value)]
    return None


def _below(place: _Place, step: str, value: Any) -> _Place:
    # Each level is marked, so that they can be counted.
    return _Place(value, f"{place.path}{_LEVEL}{step}", place)


def _has_all(value: Any, fields: Sequence[str]) -> bool:
    return all(hasattr(value, field) for field in fields)


def _refused(place: _Place, error: Exception) -> Exception:
    if isinstance(error, EncodeError):
        return _error(place, str(error))
    if isinstance(error, MessageTooLargeError):
        return error
    failed = f"a {_name(type(place.value))} that cannot be read ({short_text(error)})"
    refusal = _error(place, f"{failed}. Send a copy")
    refusal.__cause__ = error
    return refusal


def _error(place: _Place, what: str) -> EncodeError:
    return EncodeError(
        f"`{_shown(place)}` must be of a type that can be sent, got {what}."
    )


def _shown(place: _Place) -> str:
    path = place.path.replace(_LEVEL, "")
    if len(path) > _LONGEST_PATH:
        path = f"{path[: _LONGEST_PATH // 2]}...{path[-_LONGEST_PATH // 2 :]}"
    return path


def _name(kind: type) -> str:
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
