"""One program gets an authority, a certificate for each role, and private keys."""

import datetime
import os
import socket
import ssl
import subprocess
import sys
import threading

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID

from replicator.cli import main as cli
from replicator.errors import ArgumentError, AuthenticationError
from replicator.rpc.security.certificates import check_dates, make_certificates
from replicator.rpc.security.tls import ROLES, Tls, check_client, role_uri

FILES = {"ca.pem", "server.pem", "server.key", "client.pem", "client.key"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates") / "program"
    make_certificates(folder, hosts=["localhost", "127.0.0.1", "node-1"])
    return folder


def certificate(folder, role):
    pem = Tls.in_folder(folder, role).certificate.read_bytes()
    return x509.load_pem_x509_certificate(pem)


def names(folder, role):
    extensions = certificate(folder, role).extensions
    return extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME).value


def context(folder, role, *, ca_folder=None):
    files = Tls.in_folder(folder, role)
    purpose = ssl.PROTOCOL_TLS_SERVER if role == "server" else ssl.PROTOCOL_TLS_CLIENT
    made = ssl.SSLContext(purpose)
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_cert_chain(files.certificate, files.key)
    made.load_verify_locations(Tls.in_folder(ca_folder or folder, role).ca)
    return made


def meet(server, client, host="localhost"):
    """Let two contexts shake hands over a socket; raise what the client raises."""
    ends = socket.socketpair()

    def serve():
        try:
            with server.wrap_socket(ends[0], server_side=True) as wrapped:
                wrapped.send(wrapped.recv(1))
        except OSError:
            ends[0].close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ends[1], server_hostname=host) as wrapped:
            wrapped.send(b"x")
            assert wrapped.recv(1) == b"x"
    finally:
        ends[1].close()
        thread.join(60)


def test_the_folder_and_all_in_it_are_their_owners_only(folder):
    assert {path.name for path in folder.iterdir()} == FILES
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_the_authority_cannot_sign_again(folder):
    """Its private key is nowhere: no file holds the key to its public one."""
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    assert not (folder / "ca.key").exists()
    for role in ROLES:
        assert certificate(folder, role).public_key() != authority.public_key()
        certificate(folder, role).verify_directly_issued_by(authority)


@pytest.mark.parametrize("role", ROLES)
def test_a_certificate_says_its_role(folder, role):
    uris = names(folder, role).get_values_for_type(x509.UniformResourceIdentifier)
    usage = certificate(folder, role).extensions.get_extension_for_class(
        x509.ExtendedKeyUsage
    )
    only = {
        "server": ExtendedKeyUsageOID.SERVER_AUTH,
        "client": ExtendedKeyUsageOID.CLIENT_AUTH,
    }
    assert uris == [role_uri(role)]
    assert list(usage.value) == [only[role]]


def test_a_servers_certificate_names_its_hosts(folder):
    named = names(folder, "server")
    assert named.get_values_for_type(x509.DNSName) == ["localhost", "node-1"]
    assert [*map(str, named.get_values_for_type(x509.IPAddress))] == ["127.0.0.1"]


def test_they_live_for_as_long_as_was_said(tmp_path):
    make_certificates(tmp_path / "c", lifetime=datetime.timedelta(hours=1))
    left = certificate(tmp_path / "c", "client").not_valid_after_utc
    left -= datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(minutes=55) < left <= datetime.timedelta(hours=1)


def test_the_ends_of_one_program_meet(folder):
    meet(context(folder, "server"), context(folder, "client"))


def test_another_host_name_is_refused(folder):
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        meet(context(folder, "server"), context(folder, "client"), host="node-2")


def test_a_server_of_another_program_is_refused(folder, tmp_path):
    make_certificates(tmp_path / "other")
    with pytest.raises(ssl.SSLError):
        meet(context(tmp_path / "other", "server"), context(folder, "client"))


def test_what_was_made_for_a_client_serves_nobody(folder):
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = Tls.in_folder(folder, "client")
    server.load_cert_chain(files.certificate, files.key)
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        meet(server, context(folder, "client"))


def test_files_that_are_there_are_not_written_over(folder):
    before = (folder / "server.key").read_bytes()
    with pytest.raises(FileExistsError):
        make_certificates(folder)
    assert (folder / "server.key").read_bytes() == before


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(AuthenticationError, match="only its owner can write to"):
        make_certificates(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_key_that_others_can_read_is_refused(tmp_path):
    make_certificates(tmp_path / "c")
    files = Tls.in_folder(tmp_path / "c", "client")
    assert files.read_key().startswith(b"-----BEGIN PRIVATE KEY-----")
    os.chmod(files.key, 0o644)
    with pytest.raises(AuthenticationError, match="by its owner only"):
        files.read_key()


@pytest.mark.parametrize("hosts", [[], [""], "localhost"])
def test_hosts_must_be_a_list_of_names(tmp_path, hosts):
    with pytest.raises(ArgumentError, match="`hosts`"):
        make_certificates(tmp_path / "c", hosts=hosts)


def test_a_lifetime_must_be_positive(tmp_path):
    with pytest.raises(ArgumentError, match="`lifetime`"):
        make_certificates(tmp_path / "c", lifetime=datetime.timedelta())


def test_a_role_must_be_one_that_there_is(tmp_path):
    with pytest.raises(ArgumentError, match="`role`"):
        Tls.in_folder(tmp_path, "admin")  # pyright: ignore


def test_the_command_makes_them_and_says_who_needs_which(tmp_path, capsys):
    words = ["certificates", str(tmp_path / "c"), "--hosts", "node-7", "10.0.0.5"]
    assert cli.main(words) == 0
    named = names(tmp_path / "c", "server")
    assert "node-7" in named.get_values_for_type(x509.DNSName)
    assert "clients need  ca.pem client.pem client.key" in capsys.readouterr().out


def test_the_command_does_not_write_over_a_programs_files(tmp_path, capsys):
    assert cli.main(["certificates", str(tmp_path / "c")]) == 0
    assert cli.main(["certificates", str(tmp_path / "c")]) == 1
    assert "exists" in capsys.readouterr().err


def test_only_a_clients_role_connects():
    check_client([], peer="a client")
    check_client([b"node-1", role_uri("client").encode()], peer="a client")
    with pytest.raises(AuthenticationError, match="a client must have a client's"):
        check_client([role_uri("server").encode()], peer="a client")


def test_the_command_says_what_to_install(tmp_path, capsys, monkeypatch):
    import replicator.rpc.security

    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "replicator.rpc.security.certificates")
    monkeypatch.delattr(replicator.rpc.security, "certificates")
    assert cli.main(["certificates", str(tmp_path / "c")]) == 2
    assert "Install `jax-replicator[grpc]`" in capsys.readouterr().err


@pytest.mark.parametrize("days", [-40, 40])
def test_a_certificate_that_is_not_for_now_is_refused_by_its_dates(
    folder, monkeypatch, days
):
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + datetime.timedelta(days=days)

    monkeypatch.setattr(datetime, "datetime", Clock)
    with pytest.raises(
        AuthenticationError, match=r"must be valid now .*, got one from"
    ):
        check_dates(folder / "server.pem")


def test_a_certificate_and_its_key_may_lie_in_one_file(folder, tmp_path):
    both = [(folder / name).read_bytes() for name in ("server.key", "server.pem")]
    (tmp_path / "both.pem").write_bytes(b"".join(both))
    check_dates(tmp_path / "both.pem")


def test_the_transport_between_hosts_needs_no_package_for_certificates():
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "import replicator.rpc.transports.between_hosts.grpc_stream"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_no_certificate_is_refused(folder):
    with pytest.raises(AuthenticationError, match="must be a PEM file"):
        check_dates(folder / "server.key")
