"""Which secret a process of a group has, and what goes on without one."""

import logging

import pytest

from replicator.distributed.meeting import run_secret
from replicator.distributed.meeting.run_secret import find_secret
from replicator.errors import AuthenticationError
from replicator.rpc import Secret
from replicator.rpc.security.secret import FILE_VARIABLE

HERE, THERE = "127.0.0.1", "10.0.0.1"


@pytest.fixture
def environ(tmp_path):
    Secret.generate().write(tmp_path / "secret")
    return {FILE_VARIABLE: str(tmp_path / "secret")}


@pytest.fixture(params=["no TLS", "no certificates", "all"])
def installed(request, monkeypatch):
    """What of JAX and of packages a process finds."""
    has_tls, has_package = request.param != "no TLS", request.param == "all"
    monkeypatch.setattr(run_secret, "jax_has_tls", lambda: has_tls)
    monkeypatch.setattr(run_secret, "can_make_certificates", lambda: has_package)
    monkeypatch.setattr(run_secret, "own_certificate", lambda: None)
    return request.param


def test_the_secret_is_that_of_the_environment(environ, installed):
    found = find_secret(HERE, environ=environ)
    assert found == Secret.read(environ[FILE_VARIABLE])


def test_on_one_host_nothing_is_said(environ, installed, caplog):
    find_secret(HERE, environ=environ)
    assert find_secret("localhost", environ={}) is None
    assert not caplog.records


def test_beyond_this_host_an_open_group_is_told_once(caplog):
    assert find_secret(THERE, environ={}) is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "whoever reaches 10.0.0.1 can join: no secret" in record.message
    assert find_secret(THERE, environ={}, warns=False) is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("host", [HERE, THERE])
def test_a_required_secret_that_is_missing_is_refused(host):
    required = {"REPLICATOR_REQUIRE_SECRET": "1"}
    with pytest.raises(AuthenticationError, match="must be met, got no secret"):
        find_secret(host, environ=required)


@pytest.mark.parametrize("value", ["", "0"])
def test_what_is_not_required_is_not_refused(value):
    assert find_secret(HERE, environ={"REPLICATOR_REQUIRE_SECRET": value}) is None


def test_a_required_proof_to_jax_is_one(environ, installed):
    required = environ | {"REPLICATOR_REQUIRE_SECRET": "1"}
    if installed == "all":
        assert find_secret(THERE, environ=required)
        return
    with pytest.raises(AuthenticationError, match="must be met, got"):
        find_secret(HERE, environ=required)


def test_without_certificates_several_hosts_go_on_if_told(environ, installed, caplog):
    if installed == "no certificates":
        with pytest.raises(AuthenticationError, match=r"jax-replicator\[grpc\]"):
            find_secret(THERE, environ=environ)
    assert find_secret(THERE, environ=environ, insecure=True)
    assert len(caplog.records) == (installed != "all")


def test_a_secret_that_others_can_read_is_refused(environ, tmp_path):
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(AuthenticationError, match="readable by its owner only"):
        find_secret(HERE, environ=environ)


def test_a_secret_that_is_not_there_is_refused(tmp_path):
    missing = {FILE_VARIABLE: str(tmp_path / "none")}
    with pytest.raises(AuthenticationError, match="none': No such file"):
        find_secret(HERE, environ=missing)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_secret_of_another_size_is_refused(tmp_path, size):
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(bytes(size))
    with pytest.raises(AuthenticationError, match="must hold 32 random bytes, got"):
        find_secret(HERE, environ={FILE_VARIABLE: str(path)})
