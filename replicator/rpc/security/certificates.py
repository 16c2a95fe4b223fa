"""Make the certificates of one program: an authority, one for servers, one for clients.

The authority's private key is never written: it signs the two and is gone, so nobody
can sign a third. A certificate says its role twice, as extended key usage, which TLS
checks, and as a name (`urn:replicator:role:client`), which our server checks: what was
made for a client serves nobody, and a server's opens no connection. They live for days,
not years; make new ones for the next run.
"""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from replicator.errors import ArgumentError
from replicator.rpc.security.private_files import create_private
from replicator.rpc.security.tls import ROLES, Role, Tls, role_uri

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
# Clocks of hosts differ a little.
_SKEW = datetime.timedelta(minutes=5)
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
    signing_key = ec.generate_private_key(ec.SECP256R1())
    authority = _sign_authority(signing_key, lifetime=lifetime)
    _write(Tls.in_folder(folder, "server").ca, _pem(authority))
    for role in ROLES:
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.UniformResourceIdentifier(role_uri(role))]
        if role == "server":
            names += [_host_name(host) for host in hosts]
        leaf = _leaf(key, role, names, lifetime=lifetime)
        certificate = leaf.issuer_name(authority.subject).sign(
            signing_key, hashes.SHA256()
        )
        files = Tls.in_folder(folder, role)
        _write(files.certificate, _pem(certificate))
        _write(files.key, _private_pem(key))


def _sign_authority(
    key: ec.EllipticCurvePrivateKey, *, lifetime: datetime.timedelta
) -> x509.Certificate:
    # Another name for each program: OpenSSL looks authorities up by name.
    name = _name(f"replicator program {x509.random_serial_number():x}")
    builder = _builder(name, key, lifetime=lifetime).issuer_name(name)
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    return (
        builder.add_extension(constraints, critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _leaf(
    key: ec.EllipticCurvePrivateKey,
    role: Role,
    names: Sequence[x509.GeneralName],
    *,
    lifetime: datetime.timedelta,
) -> x509.CertificateBuilder:
    constraints = x509.BasicConstraints(ca=False, path_length=None)
    usage = x509.ExtendedKeyUsage([_USAGE[role]])
    return (
        _builder(_name(f"replicator {role}"), key, lifetime=lifetime)
        .add_extension(constraints, critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )


def _builder(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    lifetime: datetime.timedelta,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
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
