"""A path has one server at a time, whoever died before."""

import fcntl
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from replicator.errors import (
    AddressInUseError,
    ArgumentError,
    AuthenticationError,
    ConnectionLostError,
)
from replicator.rpc.security.secret import Secret
from replicator.rpc.transports.connect import connect, listen
from tests.rpc.transports.ends import LONG_S, SECRET, connected, pass_on, wait_until

SERVER = """
import sys, time
from replicator.rpc.transports.connect import listen
listener = listen(sys.argv[1])
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def address(tmp_path):
    tmp_path.chmod(0o700)
    return f"unix:{tmp_path}/socket"


def path_of(address):
    return address.removeprefix("unix:")


def test_a_made_up_place_is_private_and_removed():
    listener = listen("unix:")
    folder = os.path.dirname(path_of(listener.address))
    try:
        assert os.stat(folder).st_mode & 0o777 == 0o700
        for name in os.listdir(folder):
            assert os.lstat(f"{folder}/{name}").st_mode & 0o077 == 0
        assert sorted(os.listdir(folder)) == ["secret", "socket", "socket.lock"]
    finally:
        listener.close()
    assert not os.path.exists(folder)


def test_the_folder_of_a_socket_is_held_against_who_removes_old_files(address):
    folder = os.open(os.path.dirname(path_of(address)), os.O_RDONLY)
    listener = listen(address, secret=SECRET)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    listener.close()
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)


def test_the_secret_beside_the_socket_is_found():
    listener = listen("unix:")
    try:
        with connected(listener, secret=None) as ends:
            assert pass_on(*ends, 1) == 1
    finally:
        listener.close()


def test_a_restarted_server_has_the_same_secret(address):
    listen(address).close()
    folder = os.path.dirname(path_of(address))
    assert os.listdir(folder) == ["secret"]
    first = Secret.read(f"{folder}/secret")
    listen(address).close()
    assert Secret.read(f"{folder}/secret") == first


def test_the_environments_secret_is_used_where_none_lies_beside(
    address, tmp_path, monkeypatch
):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    SECRET.write(tmp_path / "elsewhere" / "s")
    monkeypatch.setenv("REPLICATOR_RPC_SECRET_FILE", str(tmp_path / "elsewhere" / "s"))
    listener = listen(address)
    try:
        assert not os.path.exists(tmp_path / "secret")
        with connected(listener, secret=SECRET) as ends:
            assert pass_on(*ends, 1) == 1
        with connected(listener, secret=None) as ends:
            assert pass_on(*ends, 2) == 2
    finally:
        listener.close()


def test_a_client_without_any_secret_is_told_so(address):
    listener = listen(address, secret=SECRET)
    try:
        with pytest.raises(ArgumentError, match="`secret` must be given"):
            connect(address, timeout_s=LONG_S)
    finally:
        listener.close()


def test_servers_that_start_at_once_agree_on_a_secret(tmp_path):
    tmp_path.chmod(0o700)
    with ThreadPoolExecutor(8) as pool:
        places = [f"unix:{tmp_path}/{number}" for number in range(8)]
        listeners = list(pool.map(listen, places))
    try:
        for listener in listeners:
            with connected(listener, secret=None) as ends:
                assert pass_on(*ends, 1) == 1
    finally:
        for listener in listeners:
            listener.close()
    assert os.listdir(tmp_path) == ["secret"]


# Paths in use.


def test_a_path_in_use_names_its_owner_at_once(address):
    listener = listen(address, secret=SECRET)
    try:
        start = time.monotonic()
        with pytest.raises(AddressInUseError, match=f"process {os.getpid()}"):
            listen(address, secret=SECRET)
        assert time.monotonic() - start < LONG_S / 2
        with connected(listener) as ends:
            assert pass_on(*ends, 1) == 1
    finally:
        listener.close()
    listen(address, secret=SECRET).close()


def test_only_one_of_many_gets_a_path(address):
    def attempt(_):
        try:
            return listen(address, secret=SECRET)
        except AddressInUseError:
            return None

    with ThreadPoolExecutor(8) as pool:
        listeners = [one for one in pool.map(attempt, range(16)) if one]
    assert len(listeners) == 1
    listeners[0].close()


def test_a_stale_socket_is_replaced(address):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path_of(address))
    with pytest.raises(ConnectionLostError, match=r"refused"):
        connect(address, secret=SECRET, timeout_s=LONG_S)
    listener = listen(address, secret=SECRET)
    try:
        with connected(listener) as ends:
            assert pass_on(*ends, 1) == 1
    finally:
        listener.close()


def test_what_is_no_socket_is_not_replaced(address):
    with open(path_of(address), "w") as file:
        file.write("precious")
    with pytest.raises(AddressInUseError, match="file"):
        listen(address, secret=SECRET)
    with open(path_of(address)) as file:
        assert file.read() == "precious"
    assert not os.path.exists(f"{path_of(address)}.lock")


def test_a_lock_that_is_a_link_is_not_followed(address, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "socket.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic"):
        listen(address, secret=SECRET)
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.slow
def test_the_path_of_a_killed_server_is_free_at_once(address):
    command = [sys.executable, "-c", SERVER, address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout.readline() == "listening\n"
        with pytest.raises(AddressInUseError, match=f"process {server.pid}"):
            listen(address)
        server.send_signal(signal.SIGKILL)
        server.wait(LONG_S)
        assert os.path.exists(path_of(address))
        listener = listen(address)
        with connected(listener, secret=None) as ends:
            assert pass_on(*ends, 1) == 1
        listener.close()


# Directories.


def test_a_directory_is_made_private(tmp_path):
    listener = listen(f"unix:{tmp_path}/new/socket", secret=SECRET)
    listener.close()
    assert os.stat(tmp_path / "new").st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="directory"):
        listen(f"unix:{tmp_path}/no/no/socket", secret=SECRET)


def test_a_directory_that_others_may_enter_is_refused_at_both_ends(address, tmp_path):
    listener = listen(address, secret=SECRET)
    try:
        tmp_path.chmod(0o755)
        with pytest.raises(AuthenticationError, match="chmod 700"):
            connect(address, secret=SECRET, timeout_s=LONG_S)
        with pytest.raises(AuthenticationError, match="chmod 700"):
            listen(f"unix:{tmp_path}/other", secret=SECRET)
    finally:
        listener.close()


def test_nobody_listening_is_told_at_once(address, tmp_path):
    for place in (address, f"unix:{tmp_path}/none/socket"):
        start = time.monotonic()
        with pytest.raises(ConnectionLostError, match=f"Nobody listens at {place}"):
            connect(place, secret=SECRET, timeout_s=LONG_S)
        assert time.monotonic() - start < LONG_S / 2
    with pytest.raises(ConnectionLostError, match="Nobody"):
        connect("unix:", secret=SECRET, timeout_s=LONG_S)


def test_a_closed_listener_leaves_no_descriptor(address):
    if not os.path.exists("/proc/self/fd"):
        return
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        listener = listen(address, secret=SECRET)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(listener.accept)
            with pytest.raises(TimeoutError):
                waiting.result(0.005)
            listener.close()
            assert isinstance(waiting.exception(LONG_S), ConnectionLostError)
    gc.collect()
    # What other tests have left may close meanwhile.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
