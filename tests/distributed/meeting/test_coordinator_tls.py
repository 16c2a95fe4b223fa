"""The certificates by which JAX's service knows the processes of a run."""

import os
import stat
from pathlib import Path

import pytest

from replicator.distributed.meeting import coordinator_tls as module
from replicator.distributed.meeting.coordinator_tls import coordinator_tls
from replicator.rpc import Secret

x509 = pytest.importorskip("cryptography.x509", reason="the extra [grpc] has it")


@pytest.fixture(autouse=True)
def jax_with_tls(monkeypatch):
    """Whatever JAX is installed: it only reads the files."""
    monkeypatch.setattr(module, "jax_has_tls", lambda: True)


@pytest.fixture(scope="module")
def secret():
    return Secret.generate()


def certificates(secret):
    with coordinator_tls(secret) as files:
        return [
            x509.load_pem_x509_certificate(Path(files[name]).read_bytes())
            for name in ("mtls_ca_file", "mtls_cert_file")
        ]


def test_without_a_secret_there_is_none():
    with coordinator_tls(None) as files:
        assert files == {}


def test_what_one_process_signs_another_ones_authority_takes(secret):
    (authority, _), (_, member) = certificates(secret), certificates(secret)
    member.verify_directly_issued_by(authority)


def test_what_another_run_signs_it_does_not_take(secret):
    (authority, _), (_, member) = certificates(secret), certificates(Secret.generate())
    with pytest.raises(ValueError, match="does not match"):
        member.verify_directly_issued_by(authority)


def test_two_processes_have_keys_of_their_own(secret):
    (_, one), (_, other) = certificates(secret), certificates(secret)
    assert one.public_key() != other.public_key()


def test_neither_the_secret_nor_the_authoritys_key_is_written(secret):
    with coordinator_tls(secret) as files:
        folder = Path(files["mtls_key_file"]).parent
        names = {path.name for path in folder.iterdir()}
        written = b"".join(path.read_bytes() for path in folder.iterdir())
    assert names == {"ca.pem", "member.pem", "member.key"}
    assert secret._key not in written
    assert written.count(b"PRIVATE KEY") == 2  # one, from BEGIN to END


def test_its_files_are_private_and_gone_afterwards(secret):
    with coordinator_tls(secret) as files:
        key = Path(files["mtls_key_file"])
        assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(key.parent).st_mode) == 0o700
    assert not key.parent.exists()


def test_its_files_are_gone_after_an_error(secret):
    with pytest.raises(RuntimeError, match="abort"), coordinator_tls(secret) as files:
        raise RuntimeError("abort")
    assert not Path(files["mtls_ca_file"]).exists()


def test_they_outlive_a_run_of_a_year(secret):
    for certificate in certificates(secret):
        lasts = certificate.not_valid_after_utc - certificate.not_valid_before_utc
        assert lasts.days > 700
