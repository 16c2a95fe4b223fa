"""Make certificates: those of a program in files, or that of a member of a group.

A program has an authority, one certificate for servers, and one for clients. The
authority's private key is never written: it signs the two and is gone, so nobody can
sign a third. A certificate names its role twice, as extended key usage, which TLS
checks, and as a name (`urn:replicator:role:client`), which our server checks: one made
for a client cannot serve, and a server's opens no connection. They are valid for days,
not years; make new ones for the next run.

The members of a group share nothing but the run's secret: each derives the same
authority from it, in its memory, and signs a certificate for itself.
"""

import datetime
import ipaddress
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from replicator.errors import ArgumentError, AuthenticationError
from replicator.rpc.security.private_files import create_private
from replicator.rpc.security.secret import Secret
from replicator.rpc.security.tls import ROLES, Tls, role_uri

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
MEMBER_URI = "replicator://group/"
"""Prefix of the name in the certificate of a member of a group."""
# Clocks of hosts differ a little; those of a group may by an hour (`roster.py`).
_SKEW = datetime.timedelta(hours=2)
# A run of months still makes new connections.
_MEMBER_LIFETIME = datetime.timedelta(days=730)
_CURVE = ec.SECP256R1()
_CURVE_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_USAGE = {
    "server": ExtendedKeyUsageOID.SERVER_AUTH,
    "client": ExtendedKeyUsageOID.CLIENT_AUTH,
}


def make_certificates(
    folder: str | os.PathLike[str],
    *,
    hosts: Sequence[str] = LOOPBACK_HOSTS,
    lifetime: datetime.timedelta = datetime.timedelta(days=30),
) -> None:
    """Write `ca.pem`, `server.pem`, `server.key`, `client.pem` and `client.key`.

    Args:
      folder: Made, mode 0700, if it is not there; others must not write to it.
      hosts: Names and addresses under which clients reach servers of the program.
      lifetime: Time for which the certificates are valid.

    Raises:
      ArgumentError: There are no hosts, or no lifetime.
      AuthenticationError: Others can write to the folder.
      FileExistsError: It holds such files.
    """
    if not hosts or not all(hosts) or isinstance(hosts, str):
        raise ArgumentError(f"`hosts` must be names of hosts, got {hosts!r}.")
    if lifetime <= datetime.timedelta():
        raise ArgumentError(f"`lifetime` must be positive, got {lifetime}.")
    Path(folder).expanduser().mkdir(mode=0o700, parents=True, exist_ok=True)
    # Another name for each program: OpenSSL looks authorities up by name.
    name = f"replicator program {x509.random_serial_number():x}"
    authority = _Authority(ec.generate_private_key(_CURVE), name, lifetime)
    authority.write(Tls.in_folder(folder, "server").ca)
    for role in ROLES:
        names = [x509.UniformResourceIdentifier(role_uri(role))]
        if role == "server":
            names += [_host_name(host) for host in hosts]
        authority.issue(Tls.in_folder(folder, role), role, names, [_USAGE[role]])


def make_member_certificate(
    secret: Secret, folder: Path, *, hosts: Sequence[str] = ()
) -> Tls:
    """Write a certificate for a member of a group, its key, and its authority.

    It serves at both ends of a connection: all members have the same role.

    Args:
      secret: The run's. The authority's key is derived from it: the same in all
        processes, and never written.
      folder: Folder to write to; only this user may write to it.
      hosts: Names and addresses of this host, for clients that check them.

    Returns:
      The files.

    Raises:
      AuthenticationError: Others can write to the folder.
      FileExistsError: It holds such files.
    """
    seed = secret.sign(b"authority 0") + secret.sign(b"authority 1")
    # Twice as many bits as the order has, so that all keys are equally likely.
    number = int.from_bytes(seed) % (_CURVE_ORDER - 1) + 1
    authority = _Authority(
        ec.derive_private_key(number, _CURVE),
        f"replicator group {secret.sign(b'name').hex()[:32]}",
        _MEMBER_LIFETIME,
    )
    files = Tls(
        ca=folder / "ca.pem",
        certificate=folder / "member.pem",
        key=folder / "member.key",
    )
    authority.write(files.ca)
    names: list[x509.GeneralName] = [*map(_host_name, hosts)]
    names.append(x509.UniformResourceIdentifier(f"{MEMBER_URI}member"))
    authority.issue(files, "member", names, _USAGE.values())
    return files


def check_dates(path: Path) -> None:
    """Check that a certificate is valid now, by this host's clock.

    Args:
      path: A PEM file; its first certificate is checked.

    Raises:
      AuthenticationError: It has expired, is not valid yet, or is not a certificate.
      OSError: It cannot be read.
    """
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise AuthenticationError(
            f"The certificate {str(path)!r} must be a PEM file, got {error}. Make "
            "another with `replicator certificates DIR`."
        ) from error
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    now = datetime.datetime.now(datetime.UTC)
    if not first <= now <= last:
        raise AuthenticationError(
            f"The certificate {str(path)!r} must be valid now ({now:%F %R} UTC), got "
            f"one from {first:%F %R} to {last:%F %R}. Make another with `replicator "
            "certificates DIR`, or set this host's clock."
        )


class _Authority:
    """A key that signs certificates of a lifetime, and its own certificate."""

    def __init__(
        self, key: ec.EllipticCurvePrivateKey, name: str, lifetime: datetime.timedelta
    ) -> None:
        self._key = key
        self._name = _name(name)
        self._lifetime = lifetime

    def write(self, path: Path) -> None:
        """Write its own certificate."""
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        builder = self._builder(self._name, self._key, constraints)
        _write(path, _pem(builder.sign(self._key, hashes.SHA256())))

    def issue(
        self,
        files: Tls,
        role: str,
        names: Sequence[x509.GeneralName],
        usage: Iterable[x509.ObjectIdentifier],
    ) -> None:
        """Write a certificate, and its key."""
        key = ec.generate_private_key(_CURVE)
        constraints = x509.BasicConstraints(ca=False, path_length=None)
        certificate = (
            self._builder(_name(f"replicator {role}"), key, constraints)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        _write(files.certificate, _pem(certificate))
        _write(files.key, _private_pem(key))

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        constraints: x509.BasicConstraints,
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        usage = _key_usage(signs_certificates=constraints.ca)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + self._lifetime)
            .add_extension(constraints, critical=True)
            .add_extension(usage, critical=True)
        )


def _name(common_name: str) -> x509.Name:
    # 64 characters is all that a common name may have.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, content: bytes) -> None:
    with os.fdopen(create_private(path), "wb") as file:
        file.write(content)
