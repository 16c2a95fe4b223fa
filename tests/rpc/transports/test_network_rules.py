"""Loopback is told from the rest, and a port's owner from nobody."""

import pytest

from replicator.errors import ArgumentError
from replicator.rpc.transports import network_rules
from replicator.rpc.transports.network_rules import loopback, permitted_place

LOOPBACK = ["localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "::1"]
# What looks like loopback, and is decided by others, or is all interfaces.
BEYOND = [
    "192.0.2.1",
    "node-1",
    "localhost.example.org",
    "127.0.0.1.example.org",
    "0177.0.0.1",
    "2130706433",
    "::",
    "::ffff:192.0.2.1",
    "2001:db8::1",
    ".".join("0000"),
]


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_needs_no_tls(host):
    assert loopback(host)
    written = f"[{host}]" if ":" in host else host
    place = permitted_place(f"grpc://{written}:5", has_tls=False, insecure=False)
    assert (place.host, place.port) == (loopback(host), 5)


def test_each_name_of_loopback_stands_for_one_address():
    names = ["Localhost", "127.0.0.1", "0:0:0:0:0:0:0:1", "127.9.9.9"]
    assert [*map(loopback, names)] == ["127.0.0.1", "127.0.0.1", "::1", "127.9.9.9"]


@pytest.mark.parametrize("host", BEYOND)
def test_all_else_does(host):
    assert not loopback(host)
    written = f"[{host}]" if ":" in host else host
    with pytest.raises(ArgumentError, match="`tls` must be given"):
        permitted_place(f"grpc://{written}:5", has_tls=False, insecure=False)
    assert permitted_place(f"grpc://{written}:5", has_tls=True, insecure=False)


@pytest.mark.parametrize(
    ("peer", "told"),
    [("ipv4:127.0.0.1:80", "127.0.0.1:80"), ("ipv6:%5B::1%5D:80", "[::1]:80")],
)
def test_peers_are_written_as_people_do(peer, told):
    assert network_rules.readable(peer) == told
