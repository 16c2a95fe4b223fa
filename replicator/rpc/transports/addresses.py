"""Addresses of servers, as strings; checks of the directory of a socket.

unix:/run/user/7/program/replay     a socket on this host, in a 0700 directory
grpc://host:port                    another host
inproc:name                         this process
unix:/...,grpc://host:port          one server, reachable in several ways
"""

import dataclasses
import os
import stat
import sys
import tempfile
from collections.abc import Callable

from replicator.errors import ArgumentError, AuthenticationError, ConnectionLostError

# `sockaddr_un.sun_path`, with the NUL at its end.
SUN_PATH_BYTES = 108 if sys.platform == "linux" else 104
_EXAMPLE = "Use 'unix:/directory/socket', 'grpc://host:port' or 'inproc:name'."


@dataclasses.dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket on this host; an empty path for a listener means: make one up."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclasses.dataclass(frozen=True, slots=True)
class GrpcAddress:
    """A TCP port; a listener on port 0 gets a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"grpc://{host}:{self.port}"


@dataclasses.dataclass(frozen=True, slots=True)
class InProcessAddress:
    """A listener of this process; an empty name for a listener means: make one up."""

    name: str

    def __str__(self) -> str:
        return f"inproc:{self.name}"


Address = UnixAddress | GrpcAddress | InProcessAddress


def parse(address: str) -> Address:
    """Return the one place that `address` names.

    Raises:
      ArgumentError: It is invalid, or a socket path too long for the system.

    >>> parse("grpc://[::1]:8470")
    GrpcAddress(host='::1', port=8470)
    >>> parse("http://host:80")
    Traceback (most recent call last):
    ...
    replicator.errors.ArgumentError: `address` must start with unix:, grpc:// or
    inproc:, got 'http://host:80'. ...
    """
    scheme, colon, rest = address.partition(":")
    parser = _PARSERS.get(scheme)
    if parser is None or not colon:
        raise ArgumentError(
            f"`address` must start with unix:, grpc:// or inproc:, got {address!r}. "
            f"{_EXAMPLE}"
        )
    return parser(rest)


def parse_all(addresses: str) -> list[Address]:
    """Return the places that a server's address names, joined by commas.

    Raises:
      ArgumentError: One of them is invalid.

    >>> [str(place) for place in parse_all("inproc:table,grpc://host:80")]
    ['inproc:table', 'grpc://host:80']
    """
    return [parse(address.strip()) for address in addresses.split(",")]


def nearest_first(
    addresses: list[Address], *, is_in_process: Callable[[str], bool]
) -> list[Address]:
    """Return those that can work from here, the nearest first.

    Args:
      addresses: Addresses of one server.
      is_in_process: Whether this process has a listener of that name.

    >>> places = parse_all("grpc://host:80,inproc:table")
    >>> [str(place) for place in nearest_first(places, is_in_process=lambda name: True)]
    ['inproc:table', 'grpc://host:80']
    """
    in_process, unix, grpc = [], [], []
    for address in addresses:
        match address:
            case InProcessAddress() if is_in_process(address.name):
                in_process.append(address)
            case UnixAddress() if os.path.exists(address.path):
                unix.append(address)
            case GrpcAddress():
                grpc.append(address)
    return [*in_process, *unix, *grpc]


def folder_for_sockets(longest_bytes: int) -> str | None:
    """Return a folder for folders of sockets: TMPDIR, or /tmp; None if neither fits.

    Args:
      longest_bytes: Most bytes of its path: TMPDIR of a build lies deep.
    """
    # In this order: a user who sets TMPDIR may have no other place to write to.
    for folder in (tempfile.gettempdir(), "/tmp"):
        is_short = len(os.fsencode(folder)) <= longest_bytes
        # A comma joins the addresses of a server.
        if is_short and "," not in folder and os.path.isdir(folder):
            return folder
    return None


def make_socket_directory() -> str:
    """Make a directory that only this user can enter, with a short path; return it."""
    folder = folder_for_sockets(SUN_PATH_BYTES - 49)
    if folder is None:
        raise ArgumentError(
            f"`TMPDIR` must be short enough for sockets ({SUN_PATH_BYTES} bytes), and "
            f"have no comma, got {tempfile.gettempdir()!r}. Set TMPDIR=/tmp."
        )
    return tempfile.mkdtemp(prefix="rpc-", dir=folder)


def check_socket_directory(path: str, *, address: str) -> None:
    """Check that this user alone can put, or change, a file at a socket's path.

    Args:
      path: Path of the socket.
      address: Its address, for errors.

    Raises:
      AuthenticationError: Others can enter or own the directory.
      ConnectionLostError: There is no such directory.
    """
    folder = os.path.dirname(path)
    # Not followed: a link there would be another user's choice of directory.
    try:
        status = os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise ConnectionLostError(
            f"Nobody listens at {address}: no {folder}."
        ) from None
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_ours or status.st_mode & 0o077:
        raise AuthenticationError(
            f"The socket of {address} must lie in a directory that only this user "
            f"({os.geteuid()}) can enter, got {folder!r} "
            f"({stat.filemode(status.st_mode)}, user {status.st_uid}). "
            f"`chmod 700` it, or use one made by `tempfile.mkdtemp()`."
        )


def _parse_unix(path: str) -> UnixAddress:
    if path and not path.startswith("/"):
        raise ArgumentError(
            f"`address` must name an absolute path after unix:, got {path!r}. "
            f"{_EXAMPLE}"
        )
    # An abstract name (leading NUL) can be reached by every user of the host; a comma
    # joins addresses.
    if "\0" in path or "," in path or path.endswith("/"):
        raise ArgumentError(
            f"`address` must name a file without a comma after unix:, got {path!r}. "
            f"{_EXAMPLE}"
        )
    length = len(os.fsencode(path)) + 1
    if length > SUN_PATH_BYTES:
        raise ArgumentError(
            f"`address` must name a path of at most {SUN_PATH_BYTES - 1} bytes after "
            f"unix: (the system's limit), got {length - 1}: {path!r}. Use a directory "
            "made by `tempfile.mkdtemp()`."
        )
    return UnixAddress(path)


def _parse_grpc(rest: str) -> GrpcAddress:
    host, _, port = rest.removeprefix("//").rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    # `int` alone would take spaces, signs, underscores and digits of other scripts.
    is_port = port.isascii() and port.isdecimal() and int(port) < 65536
    if not rest.startswith("//") or not host or "/" in rest[2:] or not is_port:
        raise ArgumentError(
            f"`address` must be grpc://host:port, got {f'grpc:{rest}'!r}. {_EXAMPLE}"
        )
    return GrpcAddress(host, int(port))


def _parse_in_process(name: str) -> InProcessAddress:
    if name and not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ArgumentError(
            "`address` must have letters, digits, '-', '_' and '.' after inproc:, got "
            f"{name!r}. {_EXAMPLE}"
        )
    return InProcessAddress(name)


_PARSERS: dict[str, Callable[[str], Address]] = {
    "unix": _parse_unix,
    "grpc": _parse_grpc,
    "inproc": _parse_in_process,
}
