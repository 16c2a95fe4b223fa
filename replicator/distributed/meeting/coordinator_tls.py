"""Mutual TLS for JAX's coordination service, which has it from jax 0.12 on.

The hosts share nothing but the run's secret. From it each process derives the same
authority, in its memory, and signs a certificate for itself, in files that JAX reads.
"""

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from replicator.rpc.security.secret import Secret


def jax_has_tls() -> bool:
    """Return whether this JAX can ask its clients for certificates."""
    return hasattr(jax.config, "jax_mtls_cert_file")


def can_make_certificates() -> bool:
    """Return whether the package that makes certificates is installed."""
    return importlib.util.find_spec("cryptography") is not None


def own_certificate() -> str | None:
    """Return the path of the certificate that the user gave JAX, if any."""
    return getattr(jax.config, "jax_mtls_cert_file", None)


def has_certificate(secret: Secret | None) -> bool:
    """Return whether this process starts JAX with a certificate, its own or a made one.

    Raises:
      AuthenticationError: The one that the user gave JAX is not valid now.
    """
    path = own_certificate()
    if path is not None and can_make_certificates():
        from replicator.rpc.security.certificates import check_dates

        check_dates(Path(path))
    return path is not None or _makes_one(secret)


@contextlib.contextmanager
def coordinator_tls(secret: Secret | None) -> Iterator[dict[str, Any]]:
    """Make a certificate for as long as JAX joins; its files are gone afterwards.

    Args:
      secret: Secret of the run, if it has one.

    Yields:
      Arguments for `jax.distributed.initialize`; none where JAX has no TLS, or has a
      certificate already.
    """
    if secret is None or not _makes_one(secret):
        yield {}
        return
    from replicator.rpc.security.certificates import (
        MEMBER_URI,
        make_member_certificate,
    )

    # In a folder that only this user can enter. If the process is killed meanwhile the
    # files stay: this user's processes can prove as much without them.
    with tempfile.TemporaryDirectory(prefix="replicator-join-") as folder:
        files = make_member_certificate(secret, Path(folder))
        yield {
            "mtls_ca_file": str(files.ca),
            "mtls_cert_file": str(files.certificate),
            "mtls_key_file": str(files.key),
            "mtls_peer_uri_prefix": MEMBER_URI,
        }


def _makes_one(secret: Secret | None) -> bool:
    can_make = jax_has_tls() and can_make_certificates()
    return secret is not None and can_make and own_certificate() is None
