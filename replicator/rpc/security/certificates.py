"""Make certificates: those of a program in files, or that of a member of a group.

A program has an authority, one certificate for servers, and one for clients. The
authority's private key is never written: it signs the two and is gone, so nobody can
sign a third. A certificate says its role twice, as extended key usage, which TLS
checks, and as a name (`urn:replicator:role:client`), which our server checks: what was
made for a client serves nobody, and a server's opens no connection. They live for days,
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
# Clocks of hosts differ a little.
_SKEW = datetime.timedelta(minutes=5)
# For members: the clocks of a group may differ by an hour, and a run of months still
# makes new connections.
_MEMBER_SKEW = datetime.timedelta(hours=2)
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
      lifetime: How long the certificates are valid.

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
    signing_key = ec.generate_private_key(_CURVE)
    # Another name for each program: OpenSSL looks authorities up by name.
    name = f"replicator program {x509.random_serial_number():x}"
    authority = _sign_authority(signing_key, name=name, lifetime=lifetime)
    _write(Tls.in_folder(folder, "server").ca, _pem(authority))
    for role in ROLES:
        key = ec.generate_private_key(_CURVE)
        names = [x509.UniformResourceIdentifier(role_uri(role))]
        if role == "server":
            names += [_host_name(host) for host in hosts]
        leaf = _leaf(key, role, names, usage=[_USAGE[role]], lifetime=lifetime)
        files = Tls.in_folder(folder, role)
        _write(files.certificate, _pem(_signed(leaf, authority, signing_key)))
        _write(files.key, _private_pem(key))


def make_member_certificate(secret: Secret, folder: Path) -> Tls:
    """Write a certificate for a member of a group, its key, and its authority.

    It serves at both ends of a connection: all members have the same role.

    Args:
      secret: The run's. The authority's key is derived from it: the same in all
        processes, and never written.
      folder: Where to write; only this user may write to it.

    Returns:
      The files.

    Raises:
      AuthenticationError: Others can write to the folder.
      FileExistsError: It holds such files.
    """
    seed = secret.sign(b"authority 0") + secret.sign(b"authority 1")
    # Twice as many bits as the order has, so that all keys are equally likely.
    number = int.from_bytes(seed) % (_CURVE_ORDER - 1) + 1
    signing_key = ec.derive_private_key(number, _CURVE)
    authority = _sign_authority(
        signing_key,
        name=f"replicator group {secret.sign(b'name').hex()[:32]}",
        lifetime=_MEMBER_LIFETIME,
        skew=_MEMBER_SKEW,
    )
    key = ec.generate_private_key(_CURVE)
    leaf = _leaf(
        key,
        "member",
        [x509.UniformResourceIdentifier(f"{MEMBER_URI}member")],
        usage=_USAGE.values(),
        lifetime=_MEMBER_LIFETIME,
        skew=_MEMBER_SKEW,
    )
    files = Tls(
        ca=folder / "ca.pem",
        certificate=folder / "member.pem",
        key=folder / "member.key",
    )
    _write(files.ca, _pem(authority))
    _write(files.certificate, _pem(_signed(leaf, authority, signing_key)))
    _write(files.key, _private_pem(key))
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


def _sign_authority(
    key: ec.EllipticCurvePrivateKey,
    *,
    name: str,
    lifetime: datetime.timedelta,
    skew: datetime.timedelta = _SKEW,
) -> x509.Certificate:
    builder = _builder(_name(name), key, lifetime=lifetime, skew=skew)
    builder = builder.issuer_name(_name(name))
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    return (
        builder.add_extension(constraints, critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _leaf(
    key: ec.EllipticCurvePrivateKey,
    role: str,
    names: Sequence[x509.GeneralName],
    *,
    usage: Iterable[x509.ObjectIdentifier],
    lifetime: datetime.timedelta,
    skew: datetime.timedelta = _SKEW,
) -> x509.CertificateBuilder:
    constraints = x509.BasicConstraints(ca=False, path_length=None)
    return (
        _builder(_name(f"replicator {role}"), key, lifetime=lifetime, skew=skew)
        .add_extension(constraints, critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usage), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )


def _signed(
    leaf: x509.CertificateBuilder,
    authority: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    return leaf.issuer_name(authority.subject).sign(key, hashes.SHA256())


def _builder(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    lifetime: datetime.timedelta,
    skew: datetime.timedelta,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - skew)
        .not_valid_after(now + lifetime)
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
