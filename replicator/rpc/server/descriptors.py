"""Limit of the files, sockets and pipes that this process may have open."""

import contextlib
import resource

MOST = 1 << 16
"""Enough descriptors; some systems allow billions, and some programs close all."""


def raise_limit() -> None:
    """Let this process have as many descriptors as it may, up to `MOST`.

    The usual 1,024 are for programs that use `select`; others may raise them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, MOST) if hard >= 0 else MOST
    if 0 <= soft < most:
        with contextlib.suppress(OSError, ValueError):  # forbidden: it stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
