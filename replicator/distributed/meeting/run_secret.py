"""Find the run's secret, and decide what goes on without one."""

import logging
import os
from collections.abc import Mapping

import jax

from replicator.distributed.meeting.coordinator_tls import (
    can_make_certificates,
    jax_has_tls,
    own_certificate,
)
from replicator.errors import AuthenticationError
from replicator.rpc.security.secret import FILE_VARIABLE, Secret
from replicator.rpc.transports.network_rules import loopback

REQUIRE_VARIABLE = "REPLICATOR_REQUIRE_SECRET"

_log = logging.getLogger(__name__)


def find_secret(
    coordinator_host: str,
    *,
    insecure: bool = False,
    warns: bool = True,
    environ: Mapping[str, str] | None = None,
) -> Secret | None:
    """Return the secret by which members of the group prove that they belong to it.

    Of a group that another host can reach, and whose connections are not all proved,
    one warning is logged; `REPLICATOR_REQUIRE_SECRET=1` refuses it, also on one host.

    Args:
      coordinator_host: Where the group meets.
      insecure: Whether a group with a secret may go on without certificates.
      warns: Whether this process is the one of the group that warns.
      environ: The environment; this process's by default.

    Raises:
      AuthenticationError: The file is missing, or others can read it; there is no
        secret, and one is required; or `cryptography` is missing.
    """
    environ = os.environ if environ is None else environ
    secret = Secret.from_environment(environ)
    open_to = _open_to(secret)
    if not open_to:
        return secret
    if environ.get(REQUIRE_VARIABLE, "0") not in ("", "0"):
        raise AuthenticationError(f"`{REQUIRE_VARIABLE}` must be met, got {open_to}")
    if loopback(coordinator_host):
        return secret
    if secret is not None and jax_has_tls() and not insecure:
        raise AuthenticationError(
            f"A group of several hosts must prove its connections, got {open_to} Or "
            "pass `insecure=True`."
        )
    if warns:
        _log.warning("whoever reaches %s can join: %s", coordinator_host, open_to)
    return secret


def _open_to(secret: Secret | None) -> str:
    """Return why a stranger could join, and what helps; "" where none can."""
    if secret is None:
        return (
            f"no secret. Set {FILE_VARIABLE} to a file of 32 random bytes, mode 0600, "
            "the same for all processes."
        )
    if not jax_has_tls():
        return (
            f"jax {jax.__version__}, whose coordination service asks nobody for a "
            "proof. Install jax 0.12 or newer."
        )
    if not (can_make_certificates() or own_certificate()):
        return (
            "no package that makes certificates. Install `jax-replicator[grpc]` "
            "everywhere."
        )
    return ""
