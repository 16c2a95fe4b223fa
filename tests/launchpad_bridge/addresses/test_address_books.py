"""How servers on several hosts are found: real gRPC with certificates, on this host."""

import asyncio
import contextlib

import pytest

from replicator.errors import AuthenticationError, CallTimeoutError, LaunchError
from replicator.launchpad_bridge.addresses.address_books import (
    AddressRegistry,
    Book,
    RegistryOfParent,
)
from replicator.rpc.client.client import Client
from replicator.rpc.security.certificates import make_certificates
from replicator.rpc.security.secret import Secret
from replicator.rpc.server.server import Server

ELSEWHERE = "inproc:nobody,unix:/nonexistent/0"


class Directory:
    """A registry in this process."""

    def __init__(self, **found):
        self.found = found

    def publish(self, planned, address):
        self.found[planned] = address

    def find(self, planned, timeout_s):
        return self.found.get(planned)


class Service:
    def whoami(self):
        return "the service"


def folder_of_run(path):
    path.mkdir(mode=0o700)
    make_certificates(path / "tls", hosts=["127.0.0.1"])
    Secret.generate().write(path / "secret")
    return path


@pytest.fixture
def book(tmp_path):
    return Book(Directory(), folder=folder_of_run(tmp_path / "run"), host="127.0.0.1")


@contextlib.contextmanager
def serving(book):
    """Serve where only other hosts' way leads; let it be known."""
    address = book.listen(ELSEWHERE).rpartition(",")[2]
    with Server(Service(), address=address, **book.server_options()) as server:
        book.publish(ELSEWHERE, server.address)
        yield server


def call(book, timeout_s=60.0, planned=ELSEWHERE):
    dial = book.dial(planned)
    with Client(
        planned, dial=dial, timeout_s=timeout_s, wait_for_ready=False
    ) as client:
        return client.whoami()


def test_a_server_elsewhere_is_reached_with_secret_and_certificates(book):
    with serving(book) as server:
        assert server.address.startswith("grpc://127.0.0.1:")
        assert call(book) == "the service"


def test_a_server_that_was_started_again_is_found_where_it_is_now(book):
    with Client(ELSEWHERE, dial=book.dial(ELSEWHERE), timeout_s=60) as client:
        for _ in range(2):
            with serving(book):
                assert client.whoami() == "the service"


def test_a_server_on_this_host_is_reached_by_its_socket(book, tmp_path):
    planned = f"inproc:nobody,unix:{tmp_path}/run/0"
    with Server(Service(), address=f"unix:{tmp_path}/run/0"):
        assert call(book, planned=planned) == "the service"


def test_who_has_another_secret_is_refused(book, tmp_path):
    other = folder_of_run(tmp_path / "other")
    (other / "secret").unlink()
    Secret.generate().write(other / "secret")
    with serving(book) as server:
        directory = Directory(**{ELSEWHERE: server.address})
        stranger = Book(directory, folder=other, host="127.0.0.1")
        with pytest.raises((AuthenticationError, CallTimeoutError)):
            call(stranger, timeout_s=5)


def test_a_server_that_nobody_published_is_not_found_in_time(book):
    with pytest.raises(LaunchError, match="did not listen within 0 s"):
        book.find(ELSEWHERE, timeout_s=0.0)


def test_a_port_of_the_users_own_is_one_of_the_host(book):
    host, port = book.listen("port:run-3").split(":")
    assert host == "127.0.0.1"
    assert 1024 < int(port) < 65536


def test_a_registry_answers_once_it_knows():
    async def play():
        registry = AddressRegistry()
        assert await registry.find("a", 0.01) is None
        waiting = asyncio.create_task(registry.find("a", 20.0))
        await asyncio.sleep(0)
        await registry.publish("b", "2")
        await registry.publish("a", "1")
        assert await waiting == "1"
        await registry.publish("a", "3")
        return await registry.find("a", 0.0)

    assert asyncio.run(play()) == "3"


def test_a_registry_can_be_asked_through_a_parent():
    directory = Directory()
    server = Server(name="addresses", address="unix:")
    server.bind("publish", directory.publish)
    server.bind("find", directory.find)
    with server:
        registry = RegistryOfParent(server.address)
        registry.publish("a", "1")
        assert registry.find("a", 1.0) == "1"
        assert registry.find("b", 0.0) is None
        registry.close()
