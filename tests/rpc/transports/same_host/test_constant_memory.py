"""What many are sent lies in memory once, and nobody can write to it."""

import contextlib
import fcntl
import mmap
import os
import resource
import socket

import numpy as np
import pytest

from replicator.rpc.codec.encoded_once import EncodedOnce
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.protocols import Kind
from replicator.rpc.transports.frames import Where, lay_out
from replicator.rpc.transports.same_host.sealed_memory import (
    IS_AVAILABLE,
    ConstantMemory,
    is_constant,
    map_sealed,
)
from tests.rpc.transports.ends import (
    LONG_S,
    TRANSPORTS,
    connected,
    listening,
    pass_on,
)
from tests.rpc.transports.same_host.test_shared_memory import (
    MIB,
    attach,
    memory_files,
    sealed,
    sharing,
)
from tests.rpc.transports.same_host.test_writable_memory import lies_in_shared_memory

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="no memfd here")

ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def value_of(number, size=50_000):
    return {"f": np.full(size, number, np.float32), "i": np.full(size, number)}


@pytest.fixture
def ends():
    """A client and a server: values go from the second to the first."""
    with listening(TRANSPORTS["unix"]) as listener, connected(listener) as ends:
        yield ends[::-1]


def constant_of(*parts):
    return ConstantMemory(lay_out([memoryview(part) for part in parts]))


def outgoing(sender):
    return sender._shared._outgoing


def incoming(receiver):
    return receiver._shared._incoming


# The memory.


def test_nobody_can_write_to_it():
    constant = constant_of(b"a" * 5000, b"b" * 100)
    assert is_constant(constant.descriptor)
    mapped = map_sealed(constant.descriptor, constant.num_bytes)
    assert mapped[:] == b"a" * 5000 + bytes(56) + b"b" * 100
    with pytest.raises(PermissionError):
        os.pwrite(constant.descriptor, b"c", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(constant.descriptor, constant.num_bytes)
    for size in (0, 3 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(constant.descriptor, size)
    with pytest.raises(TypeError):
        mapped[0] = 99


def test_its_descriptor_is_closed_with_it():
    constant = constant_of(bytes(MIB))
    descriptor = constant.descriptor
    del constant
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_receiver_copies_unless_the_kernel_says_that_nobody_can_write():
    for number, seals in enumerate([ALL_SEALS & ~fcntl.F_SEAL_WRITE, ALL_SEALS]):
        with sharing() as pair:
            descriptor = sealed(MIB, seals)
            socket.send_fds(pair.channels[0], [attach(0, MIB)], [descriptor])
            os.close(descriptor)
            body = pair.receiver.open(Where(0, 0, 0, 1), MIB)
            assert isinstance(body, np.ndarray) == (number == 0)  # see `Body`
            assert memoryview(body).readonly


# Messages.


def test_all_of_it_is_read_in_place_and_cannot_be_made_writable(ends):
    found = pass_on(*ends, EncodedOnce(value_of(7)))
    np.testing.assert_equal(found, value_of(7))
    for array in found.values():
        assert lies_in_shared_memory(array)
        assert array.ctypes.data % 64 == 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


def test_it_is_copied_once_for_all_receivers_and_messages():
    kept = EncodedOnce(value_of(3))
    row = TRANSPORTS["unix"]
    before = len(memory_files())
    with contextlib.ExitStack() as stack:
        pairs = []
        for _ in range(3):
            listener = stack.enter_context(listening(row))
            pairs.append(stack.enter_context(connected(listener)))
        found = [[pass_on(*ends, kept) for _ in range(4)] for ends in pairs]
        places = {array["f"].ctypes.data for some in found for array in some}
        assert len(places) == 3, "each receiver maps it once"
        boards = 2 * 2 * 3
        assert len(memory_files()) - before == boards + 1 + 3, "a descriptor, and maps"
        for sender, _ in pairs:
            assert len(outgoing(sender)._segments) == 1
            assert len(outgoing(sender)._lent) == 4


def test_memory_of_what_is_over_goes_when_the_next_is_sent(ends):
    sender, receiver = ends
    for number in range(20):
        found = pass_on(sender, receiver, EncodedOnce(value_of(number)))
        assert found["i"][-1] == number
        assert len(outgoing(sender)._segments) <= 2
        assert len(incoming(receiver)._segments) <= 2
    assert len(outgoing(sender)._uses) <= 3


def test_what_a_receiver_still_sees_stays(ends):
    sender, receiver = ends
    first = pass_on(sender, receiver, EncodedOnce(value_of(1)))
    for number in range(2, 9):
        pass_on(sender, receiver, EncodedOnce(value_of(number)))
    np.testing.assert_equal(first, value_of(1))
    sender.close()
    receiver.close()
    np.testing.assert_equal(first, value_of(1))


def test_old_and_new_may_be_sent_in_turn(ends):
    kept = [EncodedOnce(value_of(number)) for number in range(3)]
    for number in [0, 1, 2, 1, 0, 2, 2, 0]:
        np.testing.assert_equal(pass_on(*ends, kept[number]), value_of(number))
    assert len(outgoing(ends[0])._segments) == 3


def test_other_messages_go_on_beside_it(ends):
    kept = EncodedOnce(value_of(5))
    for number in range(5):
        np.testing.assert_equal(pass_on(*ends, value_of(number)), value_of(number))
        np.testing.assert_equal(pass_on(*ends, kept), value_of(5))
        back = pass_on(*ends[::-1], value_of(number))
        np.testing.assert_equal(back, value_of(number))


def test_past_the_bound_the_socket_takes_it(caplog):
    limits = MessageLimits(shared_bytes=MIB)
    with (
        listening(TRANSPORTS["unix"], shared_bytes=MIB) as listener,
        connected(listener, limits) as ends,
    ):
        kept = [EncodedOnce(value_of(number)) for number in range(3)]
        found = [pass_on(*ends, each) for each in kept]
        for number, each in enumerate(found):
            np.testing.assert_equal(each, value_of(number))
        assert caplog.text.count("No shared memory") == 1
        assert outgoing(ends[0]).num_bytes <= MIB
        del found, each
        np.testing.assert_equal(pass_on(*ends, kept[2]), value_of(2))
        assert len(outgoing(ends[0])._segments) == 1, "what nobody sees made room"


def test_without_memory_the_socket_takes_it(ends, caplog):
    kept = EncodedOnce(value_of(4))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 4, hard))
    try:
        for _ in range(2):
            np.testing.assert_equal(pass_on(*ends, kept), value_of(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.text.count("No shared memory") == 1
    assert lies_in_shared_memory(pass_on(*ends, kept)["f"])


def test_a_message_that_was_not_sent_is_lent_no_more(ends):
    sender, _ = ends
    kept = EncodedOnce(value_of(1))
    pass_on(*ends, kept)
    lent = len(outgoing(sender)._lent)
    sender._send = None  # a failure of the system's call
    with pytest.raises(TypeError):
        sender.send(Kind.REPLY, 1, kept, timeout_s=LONG_S)
    assert len(outgoing(sender)._lent) <= lent


def test_a_short_one_goes_by_the_socket(ends):
    pass_on(*ends, EncodedOnce(np.zeros(1000)))
    assert not outgoing(ends[0])._segments
