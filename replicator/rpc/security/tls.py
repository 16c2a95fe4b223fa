"""Files of mutual TLS, and checks of the role in a client's certificate."""

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

from replicator.base.host.paths import expanded
from replicator.errors import ArgumentError, AuthenticationError
from replicator.rpc.security.private_files import open_private

Role = Literal["server", "client"]
ROLES: tuple[Role, ...] = ("server", "client")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Paths of PEM files: one end of mutual TLS.

    Attributes:
      ca: The authority that signed the certificates of the program.
      certificate: This process's own, for the role that it has.
      key: The private key to it; mode 0600.
    """

    ca: Path
    certificate: Path
    key: Path

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            object.__setattr__(self, each.name, expanded(getattr(self, each.name)))

    @classmethod
    def in_folder(cls, folder: str | os.PathLike[str], role: Role) -> Self:
        """Return the paths that `replicator certificates` gives to the files.

        Args:
          folder: Folder in which it wrote them.
          role: `"server"` for what listens, `"client"` for what connects.

        Raises:
          ArgumentError: The role is unknown.
        """
        if role not in ROLES:
            raise ArgumentError(f"`role` must be one of {ROLES}, got {role!r}.")
        folder = Path(folder)
        return cls(
            ca=folder / "ca.pem",
            certificate=folder / f"{role}.pem",
            key=folder / f"{role}.key",
        )

    def read_key(self) -> bytes:
        """Return the private key.

        Raises:
          AuthenticationError: Others can read the file.
          OSError: It cannot be opened.
        """
        with os.fdopen(open_private(self.key), "rb") as file:
            return file.read()


def role_uri(role: Role) -> str:
    """Return the name that marks the role of a process in its certificate.

    >>> role_uri("client")
    'urn:replicator:role:client'
    """
    return f"urn:replicator:role:{role}"


def check_client(names: Iterable[bytes], *, peer: str) -> None:
    """Check that a certificate that TLS accepted is not for another role.

    Args:
      names: Names in the peer's certificate; none without TLS. Certificates that
        others made name no role, and are for the authority to judge.
      peer: Name of the peer, for the error.

    Raises:
      AuthenticationError: It is a server's.

    >>> check_client([b"urn:replicator:role:server"], peer="10.0.0.7")
    Traceback (most recent call last):
    ...
    replicator.errors.AuthenticationError: 10.0.0.7 must have a client's certificate,
    got another role's. ...
    """
    prefix = role_uri("client").removesuffix("client").encode()
    roles = {name for name in names if name.startswith(prefix)}
    if roles and role_uri("client").encode() not in roles:
        raise AuthenticationError(
            f"{peer} must have a client's certificate, got another role's. Use "
            "`Tls.in_folder(folder, 'client')` there."
        )
