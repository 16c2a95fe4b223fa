"""Check what a peer says beside values of users: each kind of message in one place.

The codec lets any value of its types through: a name may be 16 MB long, a list of names
a `range` that takes a gigabyte once it is walked, a time a complex number. So nothing
of a call, a ping, a hello or an error is used before `checked` has seen it.
"""

import threading
from typing import Any

from replicator.errors import DecodeError
from replicator.rpc import answers, own_methods
from replicator.rpc.codec.no_argument_calls import BareCall
from replicator.rpc.keepalive import MAX_CALLS
from replicator.rpc.protocols import Kind

MAX_NAME = 256
_MAX_ID_BYTES = 64
_SEQUENCE = (list, tuple)  # not a `range`, nor an array


def checked(kind: int | str, value: Any) -> Any:
    """Return the value of a message, which is as its kind has it.

    Args:
      kind: Of the message; for what a server answers itself, the name of that.
      value: What arrived.

    Raises:
      DecodeError: It is nothing of that kind.
    """
    is_bare = kind == Kind.CALL and type(value) is BareCall
    if not is_bare and not _is_right(kind, value):
        what = kind if isinstance(kind, str) else Kind(kind).name
        raise DecodeError(  # without the value: not all that arrives can be shown
            f"A message must be as its kind has it, got {type(value).__name__} for "
            f"{what}. Run the same version at both ends."
        )
    return value


def _is_right(kind: int | str, value: Any) -> bool:
    if value is None:
        return kind == Kind.PING
    if not isinstance(value, _SEQUENCE):
        return False
    match kind, value:
        case Kind.CALL, [str(name), args, kwargs, timeout_s, *_]:
            return (
                len(name) <= MAX_NAME
                and (args is None or isinstance(args, _SEQUENCE))
                and (kwargs is None or _is_named(kwargs))
                and (timeout_s is None or _is_time(timeout_s))
            )
        case Kind.PING, _:
            return len(value) <= MAX_CALLS and _are(value, int)
        case Kind.PONG, _:
            return len(value) <= MAX_CALLS and all(map(_is_state, value))
        case Kind.ERROR, [answers.RAISED, names, str(), str(), errno, attributes]:
            is_plain = attributes is None or _is_named(attributes, "__")
            return _are(names, str) and is_plain and isinstance(errno, int | None)
        case Kind.ERROR, [str(why), seconds]:
            return why in answers.WORDS and _is_time(seconds)
        case own_methods.HELLO, [bytes(client_id), *names]:
            return len(client_id) <= _MAX_ID_BYTES and _are(names, str)
        case own_methods.WELCOME, [int(), str(), names]:
            return _are(names, str)
        case own_methods.LIST_METHODS, _:
            return _are(value, str)
    return False


def _is_named(value: Any, private: str | None = None) -> bool:
    """Tell whether values have names, of which none begins with `private`."""
    if not isinstance(value, dict) or not _are(value, str):
        return False
    return private is None or not any(name.startswith(private) for name in value)


def _is_state(value: Any) -> bool:
    match value:
        case [int(), str(), seconds] if isinstance(value, _SEQUENCE):
            return _is_time(seconds)
    return False


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= threading.TIMEOUT_MAX


def _are(values: Any, kind: type) -> bool:
    is_held = isinstance(values, (dict, *_SEQUENCE))
    return is_held and all(isinstance(value, kind) for value in values)
