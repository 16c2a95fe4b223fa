"""Find the run's secret, and decide if a group without proofs may start."""

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

    A group that other hosts can reach, and that does not prove all its connections,
    logs one warning. `REPLICATOR_REQUIRE_SECRET=1` refuses it, on one host as well.

    Args:
      coordinator_host: Host that process 0 listens on.
      insecure: Whether a group with a secret may start without certificates.
      warns: Whether this process warns for the group.
      environ: Environment variables; those of this process by default.

    Raises:
      AuthenticationError: The secret's file is missing, or others can read it; or a
        proof is required, and there is no secret or no package for certificates.
    """
    environ = os.environ if environ is None else environ
    secret = Secret.from_environment(environ)
    lacking = _lacking(secret)
    if not lacking:
        return secret
    if environ.get(REQUIRE_VARIABLE, "0") not in ("", "0"):
        raise AuthenticationError(f"`{REQUIRE_VARIABLE}` must be met, got {lacking}")
    if loopback(coordinator_host):
        return secret
    if secret is not None and jax_has_tls() and not insecure:
        raise AuthenticationError(
            f"A group of several hosts must prove its connections, got {lacking} Or "
            "pass `insecure=True`."
        )
    if warns:
        _log.warning("whoever reaches %s can join: %s", coordinator_host, lacking)
    return secret


def _lacking(secret: Secret | None) -> str:
    """Return what is missing to prove all connections, with the remedy; else ""."""
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
