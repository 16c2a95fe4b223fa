"""A secret reaches the processes of its program and shows itself to nobody else."""

import copy
import os
import pickle
import subprocess
import sys

import pytest

from replicator.errors import AuthenticationError, EncodeError
from replicator.rpc.security import secret as secrets_of_programs
from replicator.rpc.security.secret import Secret


@pytest.fixture
def secret():
    return Secret.generate()


@pytest.fixture
def path(tmp_path, secret):
    secret.write(tmp_path / "secret")
    return tmp_path / "secret"


def test_two_secrets_differ():
    assert Secret.generate() != Secret.generate()


def test_what_was_written_is_read(secret, path):
    assert Secret.read(path) == secret
    assert hash(Secret.read(path)) == hash(secret)


def test_home_is_found_by_its_short_name(secret, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    secret.write("~/secret")
    assert Secret.read("~/secret") == Secret.read(tmp_path / "secret") == secret


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_the_file_is_its_owners_only_whatever_the_umask(secret, tmp_path, umask):
    before = os.umask(umask)
    try:
        secret.write(tmp_path / "secret")
    finally:
        os.umask(before)
    status = (tmp_path / "secret").stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == 32


def test_a_file_that_is_there_is_not_written_over(path):
    with pytest.raises(FileExistsError):
        Secret.generate().write(path)


def test_a_link_that_is_there_is_not_written_through(secret, tmp_path):
    (tmp_path / "secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        secret.write(tmp_path / "secret")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(secret, tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(AuthenticationError, match=r"mkdtemp"):
        secret.write(tmp_path / "secret")
    assert not (tmp_path / "secret").exists()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o700 | 0o001])
def test_a_file_that_others_can_touch_is_refused(path, mode):
    path.chmod(mode)
    with pytest.raises(AuthenticationError, match="by its owner only"):
        Secret.read(path)


def test_a_link_is_refused(path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(AuthenticationError, match="symbolic link"):
        Secret.read(tmp_path / "link")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(AuthenticationError, match="regular file"):
        Secret.read(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_file_of_another_user_is_refused(path):
    os.chown(path, 65534, 65534)
    with pytest.raises(AuthenticationError, match="user 65534"):
        Secret.read(path)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_file_of_another_size_is_refused(tmp_path, size):
    path = tmp_path / "secret"
    path.write_bytes(os.urandom(size))
    path.chmod(0o600)
    with pytest.raises(AuthenticationError, match=r"32 random bytes"):
        Secret.read(path)


def test_a_child_inherits_it_by_descriptor(secret, tmp_path):
    descriptor = secret.inheritable_descriptor()
    environment = {
        **os.environ,
        secrets_of_programs.DESCRIPTOR_VARIABLE: f"{descriptor}",
    }
    code = (
        "from replicator.rpc.security.secret import Secret\n"
        "assert Secret.from_environment() == Secret.from_environment()\n"
        f"Secret.from_environment().write({str(tmp_path / 'copy')!r})"
    )
    command = [sys.executable, "-c", code]
    try:
        subprocess.run(command, pass_fds=[descriptor], env=environment, check=True)
    finally:
        os.close(descriptor)
    assert Secret.read(tmp_path / "copy") == secret


def test_a_descriptor_may_be_read_by_many(secret):
    descriptor = secret.inheritable_descriptor()
    try:
        assert Secret.from_descriptor(descriptor) == secret
        assert Secret.from_descriptor(descriptor) == secret
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


def test_a_descriptor_of_something_else_is_refused():
    with open(os.devnull, "rb") as file, pytest.raises(AuthenticationError):
        Secret.from_descriptor(file.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        Secret.from_descriptor(12_345)


def test_the_environment_names_a_file(secret, path):
    environment = {secrets_of_programs.FILE_VARIABLE: str(path)}
    assert Secret.from_environment(environment) == secret


def test_an_environment_that_names_nothing_gives_none():
    assert Secret.from_environment({}) is None


def test_a_secret_in_the_environment_is_refused_and_not_repeated():
    told = os.urandom(32).hex()
    with pytest.raises(AuthenticationError, match="64 other characters") as caught:
        Secret.from_environment({secrets_of_programs.DESCRIPTOR_VARIABLE: told})
    assert told not in repr(caught.traceback[-1].frame.f_locals)
    assert told not in str(caught.value)


def test_it_shows_itself_to_nobody(secret):
    key = secret._key
    shown_forms = (repr(secret), str(secret), f"{secret}", "%s" % secret)  # noqa: UP031
    assert {*shown_forms} == {"Secret(<redacted>)"}
    assert not hasattr(secret, "__dict__")
    assert repr(key) not in repr([secret, {"secret": secret}])


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_is_neither_pickled_nor_copied(secret, send):
    with pytest.raises(EncodeError, match="Hand it on with"):
        send(secret)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_refused_key_is_not_in_the_traceback(size):
    keys = [os.urandom(size)]
    with pytest.raises(AuthenticationError, match=f"got {size}") as caught:
        Secret(keys.pop())
    assert "key" not in caught.traceback[-1].frame.f_locals
