"""Serialise an exception and re-raise it in another process.

Text travels: the names of its type and of the types that one refines, its
message, its notes, its traceback with causes; for an `OSError` the errno, for a
registered type its attributes. Nothing is unpickled and nothing imported: the caller
looks the names up among the registered exceptions and the builtins, takes the first
that it knows, and raises a class that is both a `RemoteError` and that type.

Types that end a program (`SystemExit`, `KeyboardInterrupt`) or hold other exceptions
(`ExceptionGroup`) are a plain `RemoteError`: no process ends because another's handler
raised one.
"""

import builtins
import functools
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from replicator.base.host.plain_text import plain
from replicator.base.types import PyTree
from replicator.errors import (
    DecodeError,
    EncodeError,
    MessageTooLargeError,
    RemoteError,
)
from replicator.rpc.codec.registry import Registry

MAX_TEXT_BYTES = 16 * 1024
_MAX_TYPES = 16
_OWN_TYPES: dict[str, type[Exception]] = {
    cls.__name__: cls for cls in (DecodeError, EncodeError, MessageTooLargeError)
}


class ErrorInfo(NamedTuple):
    """An exception as it travels; the name of a registered type begins with `@`."""

    type_names: Sequence[str]
    text: str
    traceback: str = ""
    errno: int | None = None
    attributes: Mapping[str, PyTree] | None = None


def describe_error(error: BaseException, *, registry: Registry) -> ErrorInfo:
    """Describe an exception in plain values, whatever its methods do.

    Args:
      error: Exception that a handler raised.
      registry: Classes whose exceptions travel with their attributes.

    Returns:
      At most 16 KiB of message and 16 KiB of traceback. Attributes are as they are:
      where they cannot be sent, send it without them.

    >>> describe_error(ValueError("no such row"), registry=Registry())[:2]
    (('ValueError', 'Exception', 'BaseException'), 'no such row')
    """
    cls = type(error)
    bases = [base for base in cls.__mro__ if issubclass(base, BaseException)]
    return ErrorInfo(
        tuple(_name_of(base, registry) for base in bases[:_MAX_TYPES]),
        _fitting(_text_of(error), MAX_TEXT_BYTES),
        _fitting_end(_traceback_of(error), MAX_TEXT_BYTES),
        _errno_of(error),
        _attributes_of(error) if registry.entry_of(cls) is not None else None,
    )


def remote_error(
    info: ErrorInfo, *, method: str, server: str, address: str, registry: Registry
) -> RemoteError:
    """Return the exception that the caller raises.

    Args:
      info: Description that the server sent.
      method: Name of the method.
      server: Label of the server.
      address: Address of the server.
      registry: Classes whose exceptions are known here.

    Returns:
      A `RemoteError`, and an instance of the first known type of `info.type_names`;
      its text holds no terminal commands.

    >>> info = ErrorInfo(["KeyError"], "no such row")
    >>> where = {"method": "row", "server": "'table'", "address": "unix:/run/t"}
    >>> isinstance(remote_error(info, **where, registry=Registry()), KeyError)
    True
    """
    type_name = plain([*info.type_names, "Exception"][0].lstrip("@"))
    remote_traceback = plain(info.traceback)
    where = f"raised by `{method}` of {server} at {address}"
    text = f"{plain(info.text) or type_name} ({where})"
    error = _error_class(_first_known(info.type_names, registry))(
        text, type_name=type_name, remote_traceback=remote_traceback, server=server
    )
    if info.errno is not None and isinstance(error, OSError):
        error.errno = info.errno
    if remote_traceback:
        error.add_note(f"\nIn {server}:\n{remote_traceback.rstrip()}")
    vars(error).update(info.attributes or {})  # last: one may hide `add_note`
    return error


def _first_known(names: Sequence[str], registry: Registry) -> type[Exception] | None:
    for name in names:
        known = _known(name, registry)
        if isinstance(known, type) and issubclass(known, BaseException):
            is_plain = issubclass(known, Exception)
            return known if is_plain and not issubclass(known, ExceptionGroup) else None
    return None


def _known(name: str, registry: Registry) -> object:
    if name.startswith("@"):
        entry = registry.entry_named(name[1:])
        return entry.cls if entry is not None else None
    return _OWN_TYPES.get(name) or getattr(builtins, name, None)


@functools.lru_cache(maxsize=512)
def _error_class(known: type[Exception] | None) -> type[RemoteError]:
    """Return the class that is a `RemoteError` and `known`; one per type."""
    if known is None or known is Exception:
        return RemoteError
    if issubclass(RemoteError, known):
        return RemoteError
    try:
        return type(
            f"Remote{known.__name__}",
            (RemoteError, known),
            {
                "__module__": __name__,
                "__doc__": f"A `{known.__name__}` of another process.",
                # KeyError and others build their text from what we do not have.
                "__str__": RuntimeError.__str__,
                "__reduce__": _reduce,
                "refined": known,
            },
        )
    except TypeError:  # a registered class that cannot be combined
        return RemoteError


def _reduce(error: RemoteError) -> tuple[Any, ...]:
    return _restored, (getattr(error, "refined"), error.args, vars(error))  # noqa: B009


def _restored(
    known: type[Exception], args: tuple[str], state: dict[str, Any]
) -> RemoteError:
    error = _error_class(known)(*args)
    vars(error).update(state)
    return error


def _name_of(cls: type, registry: Registry) -> str:
    entry = registry.entry_of(cls)
    return f"@{entry.name}" if entry is not None else _fitting(cls.__name__, 256)


def _errno_of(error: BaseException) -> int | None:
    errno = getattr(error, "errno", None) if isinstance(error, OSError) else None
    return errno if type(errno) is int and abs(errno) < 2**31 else None


def _attributes_of(error: BaseException) -> dict[str, PyTree]:
    held: dict[str, PyTree] = getattr(error, "__dict__", {})
    return {name: value for name, value in held.items() if not name.startswith("__")}


def _text_of(error: BaseException) -> str:
    """Return its message, even where its class fails to format it."""
    for shown in (str, repr):
        try:
            return shown(error)
        except BaseException:  # whatever a user's `__str__` raises is not for us
            continue
    return f"<{type(error).__name__}, whose `__str__` and `__repr__` raise>"


def _traceback_of(error: BaseException) -> str:
    """Return its traceback and those of its causes, from the handler's frame on."""
    try:
        shown = traceback.TracebackException(
            type(error), error, _below_our_frame(error), limit=-64, max_group_width=8
        )
        return "".join(shown.format())
    except BaseException:
        return "(its traceback cannot be shown)"


def _below_our_frame(error: BaseException) -> Any:
    trace = error.__traceback__
    return trace.tb_next if trace is not None and trace.tb_next else trace


def _fitting(text: str, max_bytes: int) -> str:
    """Return the beginning that fits into `max_bytes` of UTF-8."""
    data = text[:max_bytes].encode("utf-8", "backslashreplace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - 3].decode("utf-8", "ignore") + "…"


def _fitting_end(text: str, max_bytes: int) -> str:
    """Return the end that fits: there the failing line and the message are."""
    data = text[-max_bytes:].encode("utf-8", "backslashreplace")
    if len(data) <= max_bytes:
        return data.decode()
    return "…" + data[3 - max_bytes :].decode("utf-8", "ignore")
