"""The network is hostile: what `SECURITY.md` promises, tried from outside."""

import ast
import dataclasses
import functools
import pickle
import re
import time
import traceback
from pathlib import Path

import numpy as np
import pytest

from replicator.base import accepts
from replicator.errors import AuthenticationError
from replicator.rpc import remote_errors
from replicator.rpc.client.client import Client
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.security.authentication import (
    HANDSHAKE_TIMEOUT_S,
    PRESSED_S,
    ClientHandshake,
)
from replicator.rpc.security.secret import Secret
from replicator.rpc.server import server as rpc_server
from replicator.rpc.transports.between_hosts import chunk_queues, grpc_options
from replicator.rpc.transports.connect import connect
from replicator.rpc.transports.same_host import unread_bytes
from tests.rpc import attacks
from tests.rpc.transports.between_hosts.grpc_ends import Stranger
from tests.rpc.transports.ends import LONG_S

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / "replicator").rglob("*.py"))
FLOODS = [attacks.flood_socket, attacks.flood_grpc, attacks.flood_grpc_at_once]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with attacks.attacked(tmp_path_factory.mktemp("attacked")) as server:
        yield server


@pytest.fixture(autouse=True)
def serves(request):
    """Whatever a test did to the server: afterwards it serves its own, in time."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        for address in (server.unix, server.grpc):
            with Client(address, secret=server.secret, timeout_s=LONG_S) as client:
                np.testing.assert_array_equal(client.echo(np.arange(9)), np.arange(9))


# Who can reach it.


def test_a_server_listens_on_loopback_alone(server):
    places = attacks.tcp_listeners(server.process.pid)
    assert places
    assert all(place.is_loopback for place in places)


def test_a_servers_socket_has_a_path_in_a_private_directory(server):
    folder = Path(server.path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    names = Path("/proc/net/unix").read_text()
    assert server.path in names
    assert f"@{server.path}" not in names


# Who can open it.


@pytest.mark.parametrize("transport", ["unix", "grpc"])
def test_no_wrong_secret_opens_a_server(server, transport):
    assert not any(
        attacks.try_secret(getattr(server, transport), Secret.generate())
        for _ in range(60)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "tries"), [("unix", 20_000), ("grpc", 2_000)])
def test_wrong_secrets_in_numbers_open_nothing_and_leave_nothing(
    server, transport, tries
):
    address = getattr(server, transport)
    for _ in range(200):  # what the first ones warm up
        attacks.try_secret(address, Secret.generate())
    before = server.memory(), server.descriptors()
    assert not any(attacks.try_secret(address, Secret.generate()) for _ in range(tries))
    assert server.memory() - before[0] < 5 * 1024
    assert server.descriptors() - before[1] < 4


def test_a_recorded_handshake_opens_nothing_on_the_socket(server):
    handshake = ClientHandshake(server.secret, binding="unix")
    hello = handshake.hello()
    with attacks.raw_socket(server) as raw:
        raw.sendall(hello)
        answer = handshake.answer(attacks.read_message(raw))
        raw.sendall(answer)
        handshake.finish(attacks.read_message(raw))
    with attacks.raw_socket(server) as raw:
        raw.sendall(hello)
        attacks.read_message(raw)
        raw.sendall(answer)
        assert not attacks.read_message(raw).startswith(b"rpc-ok")
        assert attacks.is_closed(raw)


def test_a_recorded_handshake_opens_nothing_over_grpc(server):
    handshake = ClientHandshake(server.secret, binding=server.binding)
    hello = handshake.hello()
    with Stranger(server) as stranger:
        stranger.send(hello)
        answer = handshake.answer(stranger.receive())
        stranger.send(answer)
        handshake.finish(stranger.receive())
    with Stranger(server) as stranger:
        stranger.send(hello)
        stranger.receive()
        stranger.send(answer)
        assert stranger.receive().startswith(b"rpc-no")
        assert stranger.receive() is None


def test_a_servers_own_words_open_nothing(server):
    """A stranger without the secret sends back whatever it hears."""
    hello = ClientHandshake(Secret.generate()).hello()
    with attacks.raw_socket(server) as raw:
        raw.sendall(hello)
        raw.sendall(attacks.read_message(raw))
        assert not attacks.read_message(raw).startswith(b"rpc-ok")
        assert attacks.is_closed(raw)


def test_a_proof_for_the_socket_is_none_for_grpc(server):
    with Stranger(server) as stranger:
        handshake = ClientHandshake(server.secret, binding="unix")
        stranger.send(handshake.hello())
        stranger.send(handshake.answer(stranger.receive()))
        assert stranger.receive().startswith(b"rpc-no")


@pytest.mark.slow
def test_who_says_nothing_is_given_up(server):
    with attacks.raw_socket(server) as raw, Stranger(server) as stranger:
        assert attacks.is_closed(raw)
        assert stranger.receive() is None


@pytest.mark.parametrize("transport", ["unix", "grpc"])
def test_who_says_nothing_keeps_nobody_waiting(server, transport):
    took_s = []
    for _ in range(5):
        with attacks.raw_socket(server), Stranger(server):
            address, began_s = getattr(server, transport), time.monotonic()
            with Client(address, secret=server.secret, timeout_s=LONG_S) as client:
                assert client.echo(1) == 1
            took_s.append(time.monotonic() - began_s)
    assert min(took_s) < HANDSHAKE_TIMEOUT_S, "it waited for the silent"


# What a stranger can make it do.


@pytest.mark.parametrize("flood", FLOODS)
def test_strangers_cannot_make_a_server_grow(server, flood):
    flood(server, 2 << 20)
    growth = attacks.growth_kib(server, flood, strangers=8, num_bytes=32 << 20)
    # Two MiB for each stranger on a busy machine, however much it sends: here 32.
    assert growth < 64 << 10


@pytest.mark.slow
@pytest.mark.parametrize("flood", FLOODS)
def test_forty_strangers_with_32_mb_cannot_make_a_server_grow(server, flood):
    """Bare gRPC with a check of a token in Python grew by 1.1 GB."""
    growth = attacks.growth_kib(server, flood, strangers=40, num_bytes=32 << 20)
    assert growth < 256 << 10


def test_no_bytes_of_a_stranger_are_executed(server, tmp_path):
    attacks.send_raw(server, attacks.traps(tmp_path / "canary"))
    assert not (tmp_path / "canary").exists()


def test_no_bytes_of_a_peer_are_executed(server, tmp_path):
    attacks.send_frames(server, attacks.traps(tmp_path / "canary"))
    assert not (tmp_path / "canary").exists()


def test_the_traps_would_work(tmp_path):
    """Else the two tests above would show nothing."""
    for trap in attacks.pickles(tmp_path / "canary"):
        pickle.loads(trap)
        (tmp_path / "canary").rmdir()


# Where the secret shows.


def test_the_secret_is_in_no_argument_environment_or_log(server):
    for address in (server.unix, server.grpc):
        attacks.try_secret(address, Secret.generate())
    told = server.read("cmdline") + server.read("environ") + server.written()
    assert b"did not prove" in told
    assert not any(form in told for form in attacks.forms_of(server.secret))


def test_the_secret_is_in_no_traceback(server):
    wrong = Secret.generate()
    for address in (server.unix, server.grpc):
        with pytest.raises(AuthenticationError) as caught:
            connect(address, secret=wrong, timeout_s=LONG_S)
        shown = traceback.TracebackException.from_exception(
            caught.value, capture_locals=True
        )
        told = "".join(shown.format()).encode()
        assert b"Secret(<redacted>)" in told
        assert not any(form in told for form in attacks.forms_of(wrong))


# What the source may not hold.

FORBIDDEN = {
    "unpickling": re.compile(
        r"(pickle|cloudpickle|dill|joblib|marshal|shelve|torch)"
        r"\.(loads?|open|Unpickler|Pickler)$|pickle\.\w+$"
    ),
    "yaml": re.compile(r"yaml\.(unsafe_|full_)?load(_all)?$"),
    "eval": re.compile(r"(builtins\.)?(eval|exec|compile|__import__)$"),
}
# Files that are about such a thing, and why it is safe there.
LISTED = {
    # The launcher's recipes: from a launcher to its own child, by a file it made.
    ("replicator/launchpad_bridge/recipes.py", "unpickling"),
    # A step to compile or time, an op with callbacks: to one's own child, by a pipe.
    ("replicator/distributed/child.py", "unpickling"),
    # Runs a user's own script, named on the command line, as `python script.py` does.
    ("replicator/launchpad_bridge/compat/scripts.py", "eval"),
}
EVERY_INTERFACE = {
    # They are told apart from an address there, not bound.
    "replicator/distributed/clusters.py",
    "replicator/launchpad_bridge/compat/courier_client.py",
}


@pytest.fixture(scope="module", autouse=True)
def the_sources_are_forgotten():
    """Half a million nodes make each later `gc.collect` take a quarter of a second."""
    yield
    for known in (nodes, calls):
        known.cache_clear()


@functools.cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def calls(path):
    """Return what a file calls, as it is written, with the call."""
    return [(dotted(n.func), n) for n in nodes(path) if isinstance(n, ast.Call)]


def dotted(node):
    """Return `a.b.c` for such an expression, and an empty string for others."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner else ""


def texts(path):
    """Return the strings of a file that are no docstrings."""
    docstrings = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in nodes(path)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]


def test_no_source_unpickles_or_evaluates_but_where_it_is_listed():
    found = {
        (str(path.relative_to(ROOT)), what)
        for path in SOURCES
        for function, _ in calls(path)
        for what, pattern in FORBIDDEN.items()
        if pattern.fullmatch(function)
    }
    assert found <= LISTED


def test_numpy_never_loads_pickles():
    for path in SOURCES:
        for function, call in calls(path):
            if function in ("np.load", "numpy.load"):
                asked = {word.arg: ast.unparse(word.value) for word in call.keywords}
                assert asked.get("allow_pickle") == "False", path


def test_no_source_binds_to_every_interface():
    found = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for text in texts(path)
        if "0.0.0.0" in text or "[::]" in text or text == "::"
    }
    assert found <= EVERY_INTERFACE


def test_rpc_imports_nothing_by_a_name():
    for path in SOURCES:
        if path.is_relative_to(ROOT / "replicator" / "rpc"):
            functions = {function for function, _ in calls(path)}
            assert not functions & {"importlib.import_module", "pydoc.locate"}, path


# What `SECURITY.md` says.


TOLD = (ROOT / "SECURITY.md").read_text()
LIMITS = {
    **{
        f"MessageLimits.{name}": value
        for name, value in dataclasses.asdict(MessageLimits()).items()
        if name != "trusted_memory"  # no number
    },
    "accepts.MAX_NAME": accepts.MAX_NAME,
    "authentication.HANDSHAKE_TIMEOUT_S": HANDSHAKE_TIMEOUT_S,
    "authentication.PRESSED_S": PRESSED_S,
    "server.MAX_HANDSHAKES": rpc_server.MAX_HANDSHAKES,
    "grpc_options.MAX_CONNECTIONS": grpc_options.MAX_CONNECTIONS,
    "chunk_queues.WAITING_BYTES": chunk_queues.WAITING_BYTES,
    "unread_bytes.UNREAD_BYTES": unread_bytes.UNREAD_BYTES,
    "remote_errors.MAX_TEXT_BYTES": remote_errors.MAX_TEXT_BYTES,
}


def test_each_test_that_security_md_names_is_there():
    named = set(re.findall(r"`(test_\w+)`", TOLD))
    there = {
        node.name
        for room in (
            *("base", "rpc", "launchpad_bridge", "distributed", "multiprocess"),
            *("controller", "monitoring"),
        )
        for path in (ROOT / "tests" / room).rglob("test_*.py")
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
    }
    assert named - there == set()
    assert len(named) > 50


@pytest.mark.parametrize(("name", "value"), LIMITS.items(), ids=LIMITS)
def test_each_limit_is_as_security_md_says(name, value):
    (row,) = [line for line in TOLD.splitlines() if f"`{name}`" in line]
    number, unit = re.match(r"([\d.]+) ?([KMG]iB)?", row.split("|")[2].strip()).groups()
    factor = {None: 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    assert float(number) * factor == value
