"""Within a process values pass by reference, unless encoding is forced."""

import os
import threading

import numpy as np
import pytest

from replicator.errors import AddressInUseError, CallTimeoutError, ConnectionLostError
from replicator.rpc.protocols import MessageKind
from replicator.rpc.transports.connect import connect, listen
from replicator.rpc.transports.in_process import FORCE_ENCODING_VARIABLE, is_in_process
from tests.rpc.transports.ends import LONG_S, connected, pass_on


@pytest.fixture
def listener():
    listener = listen("inproc:", force_encoding=False)
    yield listener
    listener.close()


def test_values_pass_by_reference(listener):
    value = {"array": np.zeros(3), "lock": threading.Lock()}
    with connected(listener) as ends:
        got = pass_on(*ends, value)
        assert got is value
        assert ends[0].send(MessageKind.CALL, 1, value, timeout_s=LONG_S) == 0
        assert ends[1].receive(timeout_s=LONG_S).payload.num_bytes == 0


@pytest.mark.parametrize(("text", "is_shared"), [("1", False), ("0", True), ("", True)])
def test_the_environment_can_force_encoding(monkeypatch, text, is_shared):
    monkeypatch.setenv(FORCE_ENCODING_VARIABLE, text)
    listener = listen("inproc:")
    try:
        value = [np.zeros(3)]
        with connected(listener) as ends:
            assert (pass_on(*ends, value) is value) is is_shared
    finally:
        listener.close()


def test_a_name_is_taken_once_and_free_again(listener):
    with pytest.raises(AddressInUseError, match=str(os.getpid())):
        listen(listener.address)
    listener.close()
    listen(listener.address).close()


def test_made_up_names_differ_and_are_forgotten(listener):
    other = listen("inproc:")
    name = other.address.removeprefix("inproc:")
    assert other.address != listener.address
    assert is_in_process(name)
    other.close()
    assert not is_in_process(name)


def test_who_is_not_accepted_before_the_close_is_told(listener):
    client = connect(listener.address, timeout_s=LONG_S)
    listener.close()
    with pytest.raises(ConnectionLostError, match=listener.address):
        client.receive(timeout_s=LONG_S)


def test_too_many_waiting_clients_are_told(listener):
    clients = [connect(listener.address, timeout_s=LONG_S) for _ in range(128)]
    with pytest.raises(ConnectionLostError, match="accepts no clients"):
        connect(listener.address, timeout_s=0.01)
    for client in clients:
        client.close()


def test_messages_that_wait_are_bounded(listener):
    with connected(listener) as (client, server):
        for _ in range(1024):
            client.send(MessageKind.CALL, 1, None, timeout_s=0)
        with pytest.raises(CallTimeoutError, match="does not read"):
            client.send(MessageKind.CALL, 1, None, timeout_s=0)
        server.receive(timeout_s=0)
        client.send(MessageKind.CALL, 1, None, timeout_s=0)
