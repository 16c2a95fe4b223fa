"""Addresses are read as they are written, and bad ones are refused with a remedy."""

import os
import tempfile

import pytest

from replicator.errors import ArgumentError, AuthenticationError, ConnectionLostError
from replicator.rpc.transports import addresses
from replicator.rpc.transports.addresses import (
    SUN_PATH_BYTES,
    GrpcAddress,
    InProcessAddress,
    UnixAddress,
    check_socket_directory,
    make_socket_directory,
    nearest_first,
    parse,
    parse_all,
)

GOOD = {
    "unix:/tmp/a/socket": UnixAddress("/tmp/a/socket"),
    "unix:": UnixAddress(""),
    "grpc://localhost:80": GrpcAddress("localhost", 80),
    "grpc://127.0.0.1:0": GrpcAddress("127.0.0.1", 0),
    "grpc://[::1]:65535": GrpcAddress("::1", 65535),
    "inproc:a-b_c.9": InProcessAddress("a-b_c.9"),
    "inproc:": InProcessAddress(""),
}
BAD = [
    "",
    "unix",
    "/tmp/socket",
    "tcp://localhost:80",
    "unix:socket",
    "unix:/tmp/",
    "unix:/tmp/a,b",
    "unix:\0abstract",
    "unix:/tmp/\0",
    f"unix:/{'a' * (SUN_PATH_BYTES - 1)}",
    f"unix:/{'é' * 60}",
    "grpc:localhost:80",
    "grpc://localhost",
    "grpc://localhost:",
    "grpc://:80",
    "grpc://localhost:65536",
    "grpc://localhost:-1",
    "grpc://localhost:٣",
    "grpc://localhost/x:80",
    "inproc:a b",
    "inproc:a,b",
]


@pytest.mark.parametrize(("text", "address"), GOOD.items())
def test_good_addresses_are_read_and_written(text, address):
    assert parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", BAD)
def test_bad_addresses_are_refused(text):
    with pytest.raises(ArgumentError, match="`address` must"):
        parse(text)


def test_a_path_may_have_as_many_bytes_as_the_system_takes():
    path = f"/{'a' * (SUN_PATH_BYTES - 2)}"
    assert parse(f"unix:{path}") == UnixAddress(path)
    with pytest.raises(ArgumentError, match=f"at most {SUN_PATH_BYTES - 1} bytes"):
        parse(f"unix:{path}a")


def test_the_nearest_that_can_work_comes_first(tmp_path):
    path = tmp_path / "socket"
    text = f"grpc://far:1, unix:{path},unix:/nowhere/else,inproc:here,inproc:gone"
    names = {"here"}

    def nearest():
        found = nearest_first(parse_all(text), is_in_process=names.__contains__)
        return [str(address) for address in found]

    assert nearest() == ["inproc:here", "grpc://far:1"]
    path.touch()
    assert nearest() == ["inproc:here", f"unix:{path}", "grpc://far:1"]
    names.clear()
    assert nearest() == [f"unix:{path}", "grpc://far:1"]


def test_a_comma_of_tmpdir_is_in_no_socket_directory(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="a,b-", dir="/tmp") as odd:
        monkeypatch.setattr(addresses.tempfile, "tempdir", odd)
        folder = make_socket_directory()
        os.rmdir(folder)
    assert "," not in folder


def test_a_socket_directory_is_private_and_short(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(addresses.tempfile, "tempdir", str(deep))
    folder = make_socket_directory()
    try:
        assert len(folder) < 20
        check_socket_directory(f"{folder}/socket", address="unix:x")
        assert os.stat(folder).st_mode & 0o777 == 0o700
    finally:
        os.rmdir(folder)


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o770, 0o755, 0o1777])
def test_a_directory_that_others_may_enter_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(AuthenticationError, match=r"(?s)unix:x.*chmod 700"):
        check_socket_directory(f"{tmp_path}/socket", address="unix:x")


def test_a_link_or_a_file_is_no_socket_directory(tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch(mode=0o600)
    for name in ("link", "file"):
        with pytest.raises(AuthenticationError):
            check_socket_directory(f"{tmp_path}/{name}/socket", address="unix:x")
    with pytest.raises(ConnectionLostError, match="unix:x"):
        check_socket_directory(f"{tmp_path}/none/socket", address="unix:x")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path):
    tmp_path.chmod(0o700)
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(AuthenticationError, match="user 65534"):
        check_socket_directory(f"{tmp_path}/socket", address="unix:x")
