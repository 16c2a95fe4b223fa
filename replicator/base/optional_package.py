"""Packages that are not required: the error without one names the way to install it."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def optional_package(user: str, package: str, *, extra: str) -> Iterator[None]:
    """Import an optional package in this block.

    >>> with optional_package("completion", "shtab", extra="completion"):
    ...     import shtab

    Args:
      user: Class or command that needs it.
      package: Name of the package.
      extra: Extra of `jax-replicator` that installs it.

    Raises:
      ImportError: It is not installed.
    """
    try:
        yield
    except ImportError as missing:
        raise ImportError(
            f"`{user}` must have {package}, got none installed. "
            f"Run `pip install 'jax-replicator[{extra}]'`."
        ) from missing
