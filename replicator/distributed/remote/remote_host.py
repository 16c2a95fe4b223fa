"""A host that a process of a group runs on, and the command that reaches it."""

import dataclasses
import re
import shlex
from collections.abc import Mapping

from replicator.errors import ArgumentError, check_whole

CONNECT_S = 10
"""Seconds in which a host has to answer ssh."""

_NAME = re.compile(r"(?!-)[A-Za-z0-9._:@\[\]-]+")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RemoteHost:
    """A host, as the system's ssh reaches it.

    Attributes:
      address: Name or address, also for the other processes of the group; the user and
        an `@` may stand before it.
      user: User there; by default as ssh's configuration has it, as all below.
      port: Port of its sshd.
      key_file: File of the private key.
      python: Python there; by default the path of this launcher's.
      environment: Variables of its process.

    >>> RemoteHost(address="jane@10.0.0.1").name
    '10.0.0.1'
    """

    address: str
    user: str | None = None
    port: int | None = None
    key_file: str | None = None
    python: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_name("address", self.address)
        if self.user is not None:
            _check_name("user", self.user)
        if self.port is not None:
            check_whole("port", self.port)
            if not 0 < self.port < 65536:
                raise ArgumentError(
                    f"`port` must be 1 to 65535, got {self.port}. Use 22, or leave it "
                    "out."
                )
        for name, value in self.environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise ArgumentError(
                    f"`environment` must be of names without `=`, got {name!r}. Write "
                    "`NAME: value`."
                )

    @property
    def name(self) -> str:
        """The address without a user, for the other processes."""
        return self.address.rpartition("@")[2]


def _check_name(name: str, value: str) -> None:
    """Raise unless a name cannot be taken for an option or for shell text."""
    if not _NAME.fullmatch(value):
        raise ArgumentError(
            f"`{name}` must hold letters, digits and `._:@[]-` only and not begin with "
            f"`-`, got {value!r}. Give it another name in `~/.ssh/config`."
        )


def check_via(via: str) -> None:
    """Raise unless a command can stand for ssh.

    Raises:
      ArgumentError: It cannot be split, or has no place for the host.
    """
    try:
        has_place = any("{host}" in word for word in shlex.split(via))
    except ValueError:  # a quote that is not closed
        has_place = False
    if not has_place:
        raise ArgumentError(
            "`via` must be a command in which `{host}` stands for the host, got "
            f"{via!r}. Use for example `ssh -J gate {{host}}`."
        )


def connection(
    host: RemoteHost, remote_command: str, *, via: str | None = None
) -> list[str]:
    """Return the command that runs another one in the shell of a host.

    The user's configuration of ssh rules: keys of hosts, jumps, names. It never asks.

    Args:
      host: The host.
      remote_command: One command line for its shell.
      via: What to use instead of ssh; `{host}` in its words stands for the host. It is
        split as a shell would, and run without one.

    >>> connection(RemoteHost(address="b", port=2222), "uptime")[-5:]
    ['-p', '2222', '--', 'b', 'uptime']
    """
    if via is not None:
        words = [word.replace("{host}", host.address) for word in shlex.split(via)]
        return [*words, remote_command]
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"]
    # It may use a connection of the user's, but no other run goes through this one's.
    options += ["-o", "ControlMaster=no"]
    for flag, value in (("-l", host.user), ("-i", host.key_file), ("-p", host.port)):
        options += [] if value is None else [flag, str(value)]
    # An IPv6 address is in brackets only where a port may follow.
    address = re.sub(r"\[(.*)\]", r"\1", host.address)
    return ["ssh", "-T", *options, "--", address, remote_command]
