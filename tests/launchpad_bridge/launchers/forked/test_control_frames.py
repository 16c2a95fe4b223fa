"""Messages between a launcher and its fork server."""

import os
import socket

import pytest

from replicator.launchpad_bridge.launchers.forked.control_frames import Receiver, send


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_arrive_in_order_and_whole(ends):
    ours, theirs = ends
    for number in range(10):
        send(ours, {"number": number, "long": "x" * 1000})
    receiver = Receiver(theirs)
    assert [message["number"] for message in receiver.receive() or []] == list(
        range(10)
    )


def test_a_message_may_be_longer_than_one_read(ends):
    ours, theirs = ends
    send(ours, {"long": "x" * 100_000})
    assert Receiver(theirs).receive_one() == {"long": "x" * 100_000}


def test_descriptors_come_with_their_messages(ends):
    ours, theirs = ends
    pipes = [os.pipe() for _ in range(3)]
    for number, (_, writing) in enumerate(pipes):
        send(ours, {"number": number}, [writing])
        os.close(writing)
    receiver = Receiver(theirs)
    seen = 0
    while seen < 3:
        for message in receiver.receive() or []:
            writing = receiver.take_descriptor()
            os.write(writing, str(message["number"]).encode())
            assert not os.get_inheritable(writing)
            os.close(writing)
            seen += 1
    for number, (reading, _) in enumerate(pipes):
        assert os.read(reading, 10) == str(number).encode()
        os.close(reading)


def test_descriptors_that_nobody_took_can_be_closed(ends):
    ours, theirs = ends
    reading, writing = os.pipe()
    send(ours, {}, [writing])
    os.close(writing)
    receiver = Receiver(theirs)
    receiver.receive()
    receiver.close_descriptors()
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_the_end_is_told(ends):
    ours, theirs = ends
    ours.close()
    assert Receiver(theirs).receive() is None
    assert Receiver(theirs).receive_one() is None


def test_nothing_yet_is_no_end(ends):
    _, theirs = ends
    theirs.setblocking(False)
    assert Receiver(theirs).receive() == []
