"""What many are sent lies in memory once, and is written again when nobody sees it."""

import contextlib
import gc
import mmap
import os
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest

from replicator.errors import ConnectionLostError
from replicator.rpc.codec.encoded_once import EncodedOnce
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.protocols import MessageKind
from replicator.rpc.transports.connect import listen
from replicator.rpc.transports.frames import lay_out
from replicator.rpc.transports.same_host.common_body import CommonBody
from replicator.rpc.transports.same_host.outgoing_segments import CommonMemory
from replicator.rpc.transports.same_host.sealed_memory import IS_AVAILABLE
from tests.rpc.transports.ends import (
    LONG_S,
    TRANSPORTS,
    connected,
    listening,
    pass_on,
    wait_until,
)
from tests.rpc.transports.same_host.test_shared_memory import MIB, memory_files
from tests.rpc.transports.same_host.test_writable_memory import lies_in_shared_memory

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="no memfd here")


def value_of(number, size=50_000):
    return {"f": np.full(size, number, np.float32), "i": np.full(size // 2, number)}


@pytest.fixture
def ends():
    """Two ends: values go from the first to the second."""
    with listening(TRANSPORTS["unix"]) as listener, connected(listener) as ends:
        yield ends[::-1]


@pytest.fixture
def many():
    """Three such pairs."""
    with contextlib.ExitStack() as stack:
        pairs = []
        for _ in range(3):
            listener = stack.enter_context(listening(TRANSPORTS["unix"]))
            pairs.append(stack.enter_context(connected(listener))[::-1])
        yield pairs


def outgoing(sender):
    return sender._shared._outgoing


def incoming(receiver):
    return receiver._shared._incoming


def memory_of(kept):
    (body,) = [each for each in kept._kept.values() if isinstance(each, CommonBody)]
    return body.memory


# What receivers may do.


def test_receivers_cannot_write_to_it_nor_change_its_size():
    memory = CommonMemory(MIB)
    with pytest.raises(PermissionError):
        mmap.mmap(memory.descriptor, MIB)
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"x", 0)
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, size)


def test_floats_are_read_in_place_and_cannot_be_made_writable(ends):
    found = pass_on(*ends, EncodedOnce(value_of(7)))
    np.testing.assert_equal(found, value_of(7))
    assert lies_in_shared_memory(found["f"])
    assert not lies_in_shared_memory(found["i"]), "its sender may write to it"
    for array in found.values():
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


# Once for all.


def test_it_is_written_once_for_all_receivers_and_messages(many):
    before = len(memory_files())
    kept = EncodedOnce(value_of(3))
    found = [[pass_on(*ends, kept)["f"] for _ in range(4)] for ends in many]
    assert len(memory_files()) - before == 1 + 1 + 3, "a descriptor and the maps"
    assert len({array.ctypes.data for some in found for array in some}) == 3
    for sender, _ in many:
        assert len(outgoing(sender)._segments) == 1
        assert len(outgoing(sender)._lent) == 4


def test_its_descriptor_is_closed_with_it():
    body = CommonBody(lay_out([memoryview(bytes(MIB))]), [])
    descriptor = body.memory.descriptor
    del body
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_short_one_goes_by_the_socket(ends):
    pass_on(*ends, EncodedOnce(np.zeros(1000)))
    assert not outgoing(ends[0])._segments


# Who may write again, and when.


def test_memory_is_written_again_when_nobody_sees_it(many):
    kept, places = EncodedOnce(value_of(0)), set()
    for number in range(1, 20):
        for ends in many:
            found = pass_on(*ends, kept)
            assert found["f"][-1] == number - 1
        places.add(memory_of(kept).descriptor)
        kept = EncodedOnce(value_of(number), after=kept)
    assert len(places) <= 2
    for sender, receiver in many:
        assert len(outgoing(sender)._segments) <= 2
        assert len(incoming(receiver)._segments) <= 2


def test_memory_is_not_written_while_one_of_many_sees_it(many):
    first = EncodedOnce(value_of(1))
    seen = [pass_on(*ends, first) for ends in many]
    del seen[:2]
    kept = first
    del first
    for number in range(2, 12):
        kept = EncodedOnce(value_of(number), after=kept)
        for ends in many:
            assert pass_on(*ends, kept)["f"][0] == number
        np.testing.assert_equal(seen[0], value_of(1))


def test_memory_is_not_written_while_its_value_is_kept(ends):
    kept = [EncodedOnce(value_of(0))]
    for number in range(1, 4):
        kept.append(EncodedOnce(value_of(number), after=kept[0]))
    for number in [0, 1, 2, 3, 1, 0, 2, 3]:
        np.testing.assert_equal(pass_on(*ends, kept[number]), value_of(number))
    assert len({memory_of(each).descriptor for each in kept}) == 4


@pytest.mark.parametrize("end", [0, 1])
def test_memory_that_is_seen_when_a_connection_ends_is_never_written(many, end):
    kept = EncodedOnce(value_of(1))
    seen = pass_on(*many[0], kept)
    many[0][end].close()
    many[0][0].close()  # as a server does that finds its client gone
    for number in range(2, 12):
        kept = EncodedOnce(value_of(number), after=kept)
        assert pass_on(*many[1], kept)["f"][0] == number
    np.testing.assert_equal(seen, value_of(1))


def test_a_message_that_nobody_read_holds_its_memory(ends):
    sender, receiver = ends
    kept = EncodedOnce(value_of(1))
    sender.send(MessageKind.REPLY, 1, kept, timeout_s=LONG_S)
    for number in range(2, 6):
        kept = EncodedOnce(value_of(number), after=kept)
        sender.send(MessageKind.REPLY, number, kept, timeout_s=LONG_S)
    for number in range(1, 6):
        found = receiver.receive(timeout_s=LONG_S).payload.take()
        np.testing.assert_equal(found, value_of(number))


def test_values_that_do_not_follow_each_other_share_no_memory(ends):
    places = []
    for number in range(3):
        kept = EncodedOnce(value_of(number))
        pass_on(*ends, kept)
        places.append(memory_of(kept))  # which keeps its descriptor
        del kept
    assert len({id(memory) for memory in places}) == 3


FORK = """
import os
from replicator.rpc.transports.same_host.outgoing_segments import CommonMemory
memory = CommonMemory(1 << 20)
assert memory.is_free()
child = os.fork()
if child:
    os._exit(os.waitpid(child, 0)[1])
os._exit(memory.is_free())
"""


def test_a_forked_process_writes_to_none_of_it():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=LONG_S)


def test_senders_in_many_threads_never_write_what_is_seen(many):
    first = EncodedOnce(None)
    newest = [EncodedOnce(value_of(0), after=first)]
    failures, is_over = [], threading.Event()

    def pull(sender, receiver):
        seen = []
        while not is_over.is_set():
            found = pass_on(sender, receiver, newest[0])
            seen = [*seen[-2:], (int(found["f"][0]), found)]
            failures.extend(n for n, each in seen if not (each["f"] == n).all())

    threads = [threading.Thread(target=pull, args=ends) for ends in many]
    for thread in threads:
        thread.start()
    for number in range(1, 200):
        newest[0] = EncodedOnce(value_of(number), after=first)
        pass_on_once = newest[0]
        wait_until(lambda kept=pass_on_once: kept._kept or is_over.is_set())
    is_over.set()
    for thread in threads:
        thread.join()
    assert not failures


CHILD = """
import sys
from replicator.rpc.transports.connect import connect
connection = connect(sys.argv[1])
kept = connection.receive(timeout_s=60).payload.take()
print(int(kept["f"][0]), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_receiver_leaves_nothing_and_others_go_on(tmp_path, many):
    tmp_path.chmod(0o700)
    before = len(memory_files())
    listener = listen(f"unix:{tmp_path}/socket")
    command = [sys.executable, "-c", CHILD, listener.address]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as child:
        connection = listener.accept()()
        kept = EncodedOnce(value_of(1))
        connection.send(MessageKind.REPLY, 1, kept, timeout_s=LONG_S)
        assert child.stdout.readline() == "1\n"
        child.kill()
    with pytest.raises(ConnectionLostError):
        connection.receive(timeout_s=LONG_S)
    assert memory_of(kept).is_spoilt
    for number in range(2, 12):
        kept = EncodedOnce(value_of(number), after=kept)
        for ends in many:
            assert pass_on(*ends, kept)["f"][0] == number
    listener.close()
    for ends in many:
        for end in ends:
            end.close()
    del kept, connection, ends, end
    wait_until(lambda: len(memory_files()) <= before)


# Bounds.


def test_memory_that_is_over_goes(many):
    kept = EncodedOnce(value_of(0))
    for number in range(1, 12):  # each of a size of its own
        kept = EncodedOnce(value_of(number, 50_000 * number), after=kept)
        for ends in many:
            pass_on(*ends, kept)
    assert len(kept.spare) <= 4
    for sender, receiver in many:
        assert len(outgoing(sender)._segments) <= 6
        assert len(incoming(receiver)._segments) <= 6


def test_past_the_bound_the_socket_takes_it(caplog):
    limits = MessageLimits(shared_bytes=MIB)
    with (
        listening(TRANSPORTS["unix"], shared_bytes=MIB) as listener,
        connected(listener, limits) as ends,
    ):
        kept = [EncodedOnce(value_of(number)) for number in range(4)]
        found = [pass_on(*ends, each) for each in kept]
        for number, each in enumerate(found):
            np.testing.assert_equal(each, value_of(number))
        assert caplog.text.count("No shared memory") == 1
        assert outgoing(ends[0]).num_bytes <= MIB
        del found, each
        assert lies_in_shared_memory(pass_on(*ends, kept[3])["f"])


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


def test_a_board_without_a_free_place_attaches_nothing_twice(ends):
    sender, receiver = ends
    kept = EncodedOnce(value_of(1))
    seen = pass_on(sender, receiver, kept)
    taken = outgoing(sender)
    has_number, taken._has_number = taken._has_number, lambda: False
    assert pass_on(sender, receiver, kept)["f"][0] == 1, "by the socket"
    taken._has_number = has_number
    pass_on(sender, receiver, kept)
    memory = memory_of(kept)
    assert taken.add(memory.num_bytes, memory) is None, "it would forget who sees it"
    assert len(taken._segments) == 1
    assert seen["f"][0] == 1


def test_a_message_that_was_not_sent_is_lent_no_more(ends):
    sender, _ = ends
    kept = EncodedOnce(value_of(1))
    pass_on(*ends, kept)
    lent = len(outgoing(sender)._lent)
    sender._send = None  # a failure of the system's call
    with pytest.raises(TypeError):
        sender.send(MessageKind.REPLY, 1, kept, timeout_s=LONG_S)
    assert len(outgoing(sender)._lent) <= lent
