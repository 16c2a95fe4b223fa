"""The secret of a program: its file or descriptor, and how processes find it.

32 random bytes that all processes of one program know and nobody else. They travel in a
file that only its owner can read, or in a descriptor that a child inherits: never in
argv, which all users of a host can read, nor in the environment, which children, crash
reports and logs get whole. The environment may *point to* the secret:
`REPLICATOR_RPC_SECRET_FILE` (a path) or `REPLICATOR_RPC_SECRET_FD` (a descriptor).

A `Secret` is never shown: `repr` is redacted, pickling raises, and other code uses
`sign` alone. No frame that raises holds its bytes, as some tools print the locals of a
traceback.
"""

import contextlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Mapping
from typing import NoReturn, Self

from replicator.base.host.paths import expanded
from replicator.errors import AuthenticationError, EncodeError
from replicator.rpc.security.private_files import (
    check_private,
    create_private,
    open_private,
)

SECRET_BYTES = 32
FILE_VARIABLE = "REPLICATOR_RPC_SECRET_FILE"
DESCRIPTOR_VARIABLE = "REPLICATOR_RPC_SECRET_FD"
_VARIABLES = (FILE_VARIABLE, DESCRIPTOR_VARIABLE)  # the first counts


class Secret:
    """32 random bytes that prove that a process belongs to the program."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        """Hold `key`; programs use `Secret.generate` and `Secret.read`.

        Raises:
          AuthenticationError: It is not of `SECRET_BYTES`.
        """
        num_bytes = len(key)
        if num_bytes != SECRET_BYTES:
            del key
            raise AuthenticationError(
                f"`key` must hold {SECRET_BYTES} random bytes, got {num_bytes}. "
                "Make a secret with `Secret.generate()`."
            )
        self._key = bytes(key)

    @classmethod
    def generate(cls) -> Self:
        """Return a new secret.

        >>> Secret.generate()
        Secret(<redacted>)
        """
        return cls(secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Return the secret that `write` put into a file.

        >>> Secret(bytes(32)).write("secret")
        >>> Secret.read("secret") == Secret(bytes(32))
        True

        Args:
          path: A regular file of this user, mode 0600 or less; no link. `~` is home.

        Raises:
          AuthenticationError: It is another thing, or others may have read or made it.
          OSError: It cannot be opened.
        """
        descriptor = open_private(expanded(path))
        try:
            return cls.from_descriptor(descriptor)
        finally:
            os.close(descriptor)

    @classmethod
    def read_or_make(cls, path: str | os.PathLike[str]) -> Self:
        """Return the secret in a file; make both where there is none.

        Of several processes that come at once, all return the first one's.

        >>> Secret.read_or_make("shared") == Secret.read_or_make("shared")
        True

        Args:
          path: File, in a directory that others cannot write to.

        Raises:
          AuthenticationError: Others can write to the directory, or read the file.
        """
        # Under another name first: a process that dies here leaves no half a secret.
        draft = f"{os.fspath(path)}.{secrets.token_hex(8)}"
        cls.generate().write(draft)
        try:
            # Whole or not at all, and never over another's.
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            os.unlink(draft)
        return cls.read(path)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Self:
        """Return the secret that a parent passed on; the descriptor stays open.

        Args:
          descriptor: From `inheritable_descriptor` of the parent, or any other of a
            file that `read` would take.

        Raises:
          AuthenticationError: It is of something else.
          OSError: It is not open.
        """
        check_private(f"of descriptor {descriptor}", os.fstat(descriptor))
        return cls(os.pread(descriptor, SECRET_BYTES + 1, 0))

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None
    ) -> Self | None:
        """Return the secret that the environment points to, or None.

        >>> Secret.from_environment({}) is None
        True

        Args:
          environment: Variables; those of this process by default.

        Raises:
          AuthenticationError: It points to nothing, or to no secret of this user's.
        """
        environment = os.environ if environment is None else environment
        try:
            return cls._found(environment)
        except AuthenticationError:  # one of Python's errors of the system, too
            raise
        except OSError as error:
            name = next(name for name in _VARIABLES if environment.get(name))
            raise AuthenticationError(
                f"`{name}` must point to the run's secret, got "
                f"{environment[name]!r}: {error.strerror}. Put 32 random bytes into a "
                "file, mode 0600, the same for all processes, and name it."
            ) from error

    @classmethod
    def _found(cls, environment: Mapping[str, str]) -> Self | None:
        if path := environment.get(FILE_VARIABLE):
            return cls.read(path)
        number = environment.get(DESCRIPTOR_VARIABLE)
        if not number:
            return None
        if not (number.isascii() and number.isdecimal() and len(number) < 10):
            num_characters = len(number)
            del number, environment  # someone may have put the secret itself there
            raise AuthenticationError(
                f"`{DESCRIPTOR_VARIABLE}` must be the number of an open descriptor, "
                f"got {num_characters} other characters. Use that of "
                "`secret.inheritable_descriptor()` in the parent."
            )
        return cls.from_descriptor(int(number))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Put it into a new file that only this user can read.

        Args:
          path: New file, in a directory that others cannot write to.

        Raises:
          AuthenticationError: Others can write to the directory.
          FileExistsError: Something is there.
        """
        descriptor = create_private(expanded(path))
        try:
            os.write(descriptor, self._key)
        finally:
            os.close(descriptor)

    def inheritable_descriptor(self) -> int:
        """Return a descriptor of a nameless file that children may inherit.

        Pass it in `pass_fds` of a child, and its number in `REPLICATOR_RPC_SECRET_FD`;
        close it when the last child was started.
        """
        # A file, not a pipe: each reader finds it whole, however many there are.
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("secret", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile(buffering=0) as file:
                descriptor = os.dup(file.fileno())
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, self._key)
        return descriptor

    def sign(self, message: bytes) -> bytes:
        """Return the HMAC-SHA256 of a message under this secret.

        >>> len(Secret.generate().sign(b"message"))
        32
        """
        return hmac.digest(self._key, message, "sha256")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(self.sign(b"hash"))

    def __repr__(self) -> str:
        return "Secret(<redacted>)"

    def __reduce__(self) -> NoReturn:
        raise EncodeError(
            "A `Secret` must not be pickled, copied or sent. Hand it on with "
            "`secret.write(path)` or `secret.inheritable_descriptor()`."
        )
