"""Let JAX's coordination service know its processes: mutual TLS, from jax 0.12 on.

All that hosts have in common is the run's secret. From it each process makes the same
authority in its memory, and signs itself a certificate; JAX reads these from files.
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
    """Return whether this JAX can ask who connects to its coordination service."""
    return hasattr(jax.config, "jax_mtls_cert_file")


def can_make_certificates() -> bool:
    """Return whether the package that makes certificates is installed."""
    return importlib.util.find_spec("cryptography") is not None


def own_certificate() -> str | None:
    """Return the file of the certificate that the user gave JAX, if one was given."""
    return getattr(jax.config, "jax_mtls_cert_file", None)


def makes_certificates(secret: Secret | None) -> bool:
    """Return whether this process makes itself a certificate, from the run's secret."""
    can_make = jax_has_tls() and can_make_certificates()
    return secret is not None and can_make and own_certificate() is None


def check_own_certificate() -> None:
    """Return if that which the user gave JAX, if any, is for now.

    Raises:
      AuthenticationError: It is not.
    """
    path = own_certificate()
    if path is not None and can_make_certificates():
        from replicator.rpc.security.certificates import check_dates

        check_dates(Path(path))


@contextlib.contextmanager
def coordinator_tls(secret: Secret | None) -> Iterator[dict[str, Any]]:
    """Make a certificate for as long as JAX joins; its files are gone afterwards.

    Args:
      secret: The run's; None for no certificate.

    Yields:
      What `jax.distributed.initialize` takes besides.
    """
    if secret is None:
        yield {}
        return
    from replicator.rpc.security.certificates import (
        MEMBER_URI,
        make_member_certificate,
    )

    # In a folder that only this user can enter. Where the process is killed meanwhile
    # the files stay: what they prove, this user's processes can prove anyway.
    with tempfile.TemporaryDirectory(prefix="replicator-join-") as folder:
        files = make_member_certificate(secret, Path(folder))
        yield {
            "mtls_ca_file": str(files.ca),
            "mtls_cert_file": str(files.certificate),
            "mtls_key_file": str(files.key),
            "mtls_peer_uri_prefix": MEMBER_URI,
        }
