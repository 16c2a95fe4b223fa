"""Check the messages of a peer, other than users' values, kind by kind.

The codec lets any value of its types through: a name may be 16 MB long, a list of names
a `range` that takes a gigabyte once it is walked, a time a complex number. So nothing
of a call, a ping, a hello or an error is used before `checked` has seen it. Rules for
the parts are those of `base/accepts`, as for methods of the library.
"""

from typing import Any

from replicator.base.accepts import seconds, text, texts
from replicator.errors import DecodeError
from replicator.rpc import answers, own_methods
from replicator.rpc.codec.no_argument_calls import NoArgumentCall
from replicator.rpc.keepalive import MAX_CALLS
from replicator.rpc.protocols import MessageKind

_SEQUENCE = (list, tuple)  # not a `range`, nor an array
_is_name = text().is_right
_is_time = seconds().is_right
_are_classes = texts(256).is_right
_are_methods = texts(65_536).is_right


def checked(kind: int | str, value: Any) -> Any:
    """Return the value of a message if it is valid for its kind.

    Args:
      kind: Kind of the message; for a built-in method, the name of the method.
      value: Value that arrived.

    Raises:
      DecodeError: The value is not valid for that kind.

    >>> checked(MessageKind.PING, [3, 4])
    [3, 4]
    >>> checked(MessageKind.PING, ["3"])
    Traceback (most recent call last):
    ...
    replicator.errors.DecodeError: A message must be as its kind has it, got list for
    PING. Run the same version at both ends.
    """
    is_bare = kind == MessageKind.CALL and type(value) is NoArgumentCall
    if not is_bare and not _is_right(kind, value):
        what = kind if isinstance(kind, str) else MessageKind(kind).name
        raise DecodeError(  # without the value: not all that arrives can be shown
            f"A message must be as its kind has it, got {type(value).__name__} for "
            f"{what}. Run the same version at both ends."
        )
    return value


def _is_right(kind: int | str, value: Any) -> bool:
    if value is None:
        return kind == MessageKind.PING
    if not isinstance(value, _SEQUENCE):
        return False
    match kind, value:
        case MessageKind.CALL, [str(name), args, kwargs, timeout_s, *_]:
            return (
                _is_name(name)
                and (args is None or isinstance(args, _SEQUENCE))
                and (kwargs is None or _is_named(kwargs))
                and (timeout_s is None or _is_time(timeout_s))
            )
        case MessageKind.PING, _:
            return len(value) <= MAX_CALLS and all(type(call) is int for call in value)
        case MessageKind.PONG, _:
            return len(value) <= MAX_CALLS and all(map(_is_state, value))
        case MessageKind.ERROR, [
            answers.RAISED,
            names,
            str(),
            str(),
            errno,
            attributes,
        ]:
            is_plain = attributes is None or _is_named(attributes, "__")
            return _are_classes(names) and is_plain and isinstance(errno, int | None)
        case MessageKind.ERROR, [str(why), seconds]:
            return why in answers.REASONS and _is_time(seconds)
        case own_methods.HELLO, [str()]:
            return True
        case own_methods.WELCOME, [int(), str(), names]:
            return _are_methods(names)
        case own_methods.LIST_METHODS, _:
            return _are_methods(value)
    return False


def _is_named(value: Any, private: str | None = None) -> bool:
    """Return whether it is a dict of named values, no name beginning `private`."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return False
    return private is None or not any(name.startswith(private) for name in value)


def _is_state(value: Any) -> bool:
    match value:
        case [int(), str(), seconds] if isinstance(value, _SEQUENCE):
            return _is_time(seconds)
    return False
