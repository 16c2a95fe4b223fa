"""Shared memory is reused when nobody sees it, bounded, sealed, and leaks nothing."""

import contextlib
import fcntl
import gc
import logging
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from replicator.errors import CallTimeoutError, ConnectionLostError, DecodeError
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.transports.connect import connect
from replicator.rpc.transports.frames import Where, frame_with_shared_body, lay_out
from replicator.rpc.transports.same_host.outgoing_segments import size_class
from replicator.rpc.transports.same_host.sealed_memory import IS_AVAILABLE, make_sealed
from replicator.rpc.transports.same_host.shared_memory import SharedMemory
from replicator.rpc.transports.same_host.unread_bytes import UNREAD_BYTES
from tests.rpc.transports.ends import (
    LONG_S,
    SHORT_S,
    TRANSPORTS,
    connected,
    listening,
    pass_on,
    raw_peer,
    wait_until,
)

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="no memfd here")

MIB = 1 << 20
SIZE = 1 << 18


class Pair:
    """Two ends that share memory."""

    def __init__(self, *, bound=64 * MIB, receive_bound=None, board_bytes=1 << 12):
        self.channels = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        boards = []
        for _ in range(2):
            descriptor, board = make_sealed(board_bytes)
            os.close(descriptor)
            boards.append(board)
        self.sender, self.receiver = (
            SharedMemory(
                self.channels[index],
                board=boards[index],
                peers_board=boards[1 - index],
                send_bytes=bound,
                receive_bytes=receive_bound or bound,
                peer=f"end {index}",
            )
            for index in range(2)
        )

    def place(self, value, size=SIZE):
        return self.sender.place(lay_out([memoryview(bytes([value]) * size)]))

    def pass_on(self, value, size=SIZE):
        where = self.place(value, size)
        return None if where is None else self.receiver.open(where, size)

    @property
    def num_bytes(self):
        return self.sender._outgoing.num_bytes

    def close(self):
        self.sender.close()
        self.receiver.close()


@contextlib.contextmanager
def sharing(**bounds):
    pair = Pair(**bounds)
    try:
        yield pair
    finally:
        pair.close()


@pytest.fixture
def pair():
    with sharing() as pair:
        yield pair


def memory_files():
    """List what of ours is open or mapped in this process."""
    gc.collect()
    opened = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            opened.append(os.readlink(f"/proc/self/fd/{name}"))
    with open("/proc/self/maps") as file:
        opened += file.read().splitlines()
    return [name for name in opened if "memfd:replicator-rpc" in name]


# Who may reuse a slot, and when.


def test_a_body_arrives_read_only(pair):
    body = pair.pass_on(7)
    for view in (body, np.ndarray((SIZE,), np.uint8, body)):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    assert bytes(body) == b"\7" * SIZE


def test_a_slot_is_not_reused_while_anything_of_it_is_seen(pair):
    keepers = [
        lambda view: view,
        lambda view: view[5:6],
        lambda view: np.frombuffer(view, np.uint8),
        lambda view: np.frombuffer(view, np.uint8)[3:9].reshape(2, 3).T,
        lambda view: np.frombuffer(view, np.float32).view(np.uint8),
        lambda view: {"deep": [memoryview(np.frombuffer(view, np.uint8))]},
    ]
    kept = [keep(pair.pass_on(number)) for number, keep in enumerate(keepers)]
    for _ in range(20):
        pair.pass_on(255)
    for number, each in enumerate(kept):
        seen = each["deep"][0] if isinstance(each, dict) else each
        assert (np.asarray(seen) == number).all()


def test_reserved_memory_is_sent_from_where_it_is(pair):
    memory = pair.sender.reserve(SIZE)
    memory[:] = 5
    where = pair.sender.place(lay_out([memoryview(memory[: SIZE // 2])]))
    view = pair.receiver.open(where, SIZE // 2)
    assert (view == 5).all()
    memory[:] = 6
    assert (view == 6).all()


def test_what_is_not_in_reserved_memory_is_copied_behind_it(pair):
    memory = pair.sender.reserve(SIZE)
    memory[:100_000] = 5
    layout = lay_out([memoryview(memory[:100_000]), memoryview(b"7" * 10_000)])
    view = pair.receiver.open(pair.sender.place(layout), layout.num_bytes)
    assert (view[:100_000] == 5).all()
    assert bytes(view[layout.offsets[1] :]) == b"7" * 10_000


@pytest.mark.parametrize(
    "parts",
    [
        lambda memory: [memory[64:50_000]],
        lambda memory: [memory[100_000:], memory[:100_000]],
        lambda memory: [memory[:50_000], memory[50_000:]],
        lambda memory: [memory[:50_000], memory[:100_000]],
        lambda memory: [memory[:50_000], np.full(SIZE, 7, np.uint8)],
    ],
    ids=["not its start", "another order", "not aligned", "twice", "too much"],
)
def test_reserved_memory_that_is_sent_otherwise_is_copied(pair, parts):
    memory = pair.sender.reserve(SIZE)
    memory[:] = np.arange(SIZE) % 251
    due = parts(memory)
    layout = lay_out([memoryview(part) for part in due])
    view = pair.receiver.open(pair.sender.place(layout), layout.num_bytes)
    for start, part in zip(layout.offsets, due, strict=True):
        assert (view[start : start + len(part)] == part).all()


def test_reserved_memory_that_is_sent_again_is_copied(pair):
    memory = pair.sender.reserve(SIZE)
    memory[:] = 5
    first, second = (pair.sender.place(lay_out([memory.data])) for _ in range(2))
    assert first != second
    assert (pair.receiver.open(second, SIZE) == 5).all()


def test_reserved_memory_that_is_not_sent_is_free_again(pair):
    for _ in range(200):
        pair.sender.reserve(MIB)[:] = 1
    assert pair.num_bytes == 16 * MIB
    assert len(pair.sender._outgoing._lent) == 1


@pytest.mark.parametrize("others", [0, 40], ids=["few lent", "many lent"])
def test_reserved_memory_is_not_written_while_it_is_seen_here(pair, others):
    kept = [pair.pass_on(1, 40_000) for _ in range(others)]
    array = np.ndarray((2, SIZE // 2), np.uint8, pair.sender.reserve(SIZE))
    array[:] = 5
    where = pair.sender.place(lay_out([memoryview(array.reshape(-1))]))
    pair.receiver.open(where, SIZE)  # and is dropped
    for _ in range(30):
        pair.place(7)
    seen = array[1, 5:]
    del array
    for _ in range(30):
        pair.place(7)
    assert (seen == 5).all()
    del seen
    assert where[:2] in {pair.place(7)[:2] for _ in range(30)}
    assert len(kept) == others


def test_the_end_of_an_older_use_leaves_a_later_reservation(pair):
    old = pair.sender.reserve(SIZE)
    address, where = old.ctypes.data, pair.sender._reserved[old.ctypes.data].where
    pair.sender.place(lay_out([old.data]))
    pair.receiver.open(where, SIZE)  # and is dropped
    del old
    new = pair.sender.reserve(SIZE)
    assert new.ctypes.data == address
    pair.sender._release(address, where)  # late, in another thread
    assert pair.sender.place(lay_out([new.data])).slot == where.slot


def test_reserved_memory_of_a_message_that_was_not_sent_is_not_written(pair):
    memory = pair.sender.reserve(SIZE)
    memory[:] = 5
    pair.sender.take_back(pair.sender.place(lay_out([memory.data])))
    for _ in range(30):
        pair.place(7)
    assert (memory == 5).all()


def test_reserved_memory_outlives_its_connection():
    with sharing() as pair:
        memory = pair.sender.reserve(SIZE)
    memory[:] = 5
    assert (memory == 5).all()


def test_a_slot_is_reused_as_soon_as_nobody_sees_it(pair):
    first = pair.place(1)
    view = pair.receiver.open(first, SIZE)
    second = pair.place(2)
    assert second.offset != first.offset
    array = np.frombuffer(view, np.uint8)[10:20]
    del view
    assert pair.place(3).offset not in (first.offset, second.offset)
    del array
    again = pair.place(4)
    assert again[:3] == first[:3]
    assert again.uses == first.uses + 1


def test_a_message_that_nobody_looked_at_is_released():
    with listening(TRANSPORTS["unix"]) as listener, connected(listener) as ends:
        client, server = ends
        for _ in range(300):
            client.send(1, 1, bytes(MIB), timeout_s=LONG_S)
            server.receive(timeout_s=LONG_S)
        assert client._shared._outgoing.num_bytes == 16 * MIB
        assert len(client._shared._outgoing._lent) == 1


def test_the_garbage_collector_releases_too(pair):
    lent = pair.place(1)
    view = pair.receiver.open(lent, SIZE)
    cycle = [view]
    cycle.append(cycle)
    other = pair.place(2)
    assert other.offset != lent.offset
    pair.sender.take_back(other)
    del view, cycle
    gc.collect()
    assert lent.offset in (pair.place(3).offset, pair.place(4).offset)


def test_views_may_die_in_any_thread(pair):
    def hold(_):
        for number in range(200):
            with lock:
                view = pair.pass_on(number % 251)
            assert bytes(view[::65_536]) == bytes([number % 251]) * 4

    lock = threading.Lock()  # one thread at a time opens
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hold, range(4)))
    assert pair.num_bytes == 16 * MIB


def test_many_threads_place_at_once(pair):
    def place(number):
        return [pair.place(number, MIB) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        places = list(pool.map(place, range(4)))
    for number, wheres in enumerate(places):
        for where in wheres:
            assert bytes(pair.receiver.open(where, MIB)) == bytes([number]) * MIB


def test_what_was_not_sent_is_free_again(pair):
    first = pair.place(1)
    pair.sender.take_back(first)
    assert pair.place(2)[:3] == first[:3]
    pair.sender.take_back(first)  # of an earlier use: not the present one's
    assert pair.place(3)[:3] != first[:3]


def test_both_ways_are_independent(pair):
    there = pair.pass_on(1)
    where = pair.receiver.place(lay_out([memoryview(b"\2" * SIZE)]))
    back = pair.sender.open(where, SIZE)
    assert (there[0], back[0]) == (1, 2)


# Bounds.


def test_past_the_bound_there_is_no_room_and_it_is_said_once(caplog):
    with sharing(bound=3 * MIB) as pair, caplog.at_level(logging.WARNING):
        kept = [pair.pass_on(number, MIB) for number in range(6)]
        assert [view is None for view in kept] == [False] * 3 + [True] * 3
        assert pair.num_bytes <= 3 * MIB
        assert caplog.text.count("shared_bytes") == 1
        assert "end 1" not in caplog.text
        assert "end 0" in caplog.text
        kept.clear()
        assert pair.pass_on(9, MIB)[0] == 9


def test_free_segments_make_room_for_other_sizes():
    with sharing(bound=24 * MIB) as pair:
        for _ in range(3):
            for size in (SIZE, MIB, 9 * MIB, 20 * MIB, 3 * MIB):
                view = pair.pass_on(5, size)
                assert bytes(view[-3:]) == b"\5" * 3
                del view
                assert pair.num_bytes <= 24 * MIB
        mapped = pair.receiver._incoming._segments.values()
        assert sum(len(segment.memory) for segment in mapped) <= 24 * MIB


def test_segments_in_use_are_not_dropped():
    with sharing(bound=24 * MIB) as pair:
        kept = pair.pass_on(5, 9 * MIB)
        assert pair.pass_on(6, 20 * MIB) is None
        assert bytes(kept[::MIB]) == b"\5" * 9


def test_there_are_no_more_slots_than_the_board_has_places():
    with sharing(board_bytes=16) as pair:
        kept = [pair.pass_on(number) for number in range(6)]
        assert [view is None for view in kept] == [False] * 4 + [True] * 2
        del kept[1]
        assert pair.pass_on(7)[0] == 7


def test_little_memory_falls_back_to_the_socket_and_says_so_once(caplog):
    value = np.arange(200_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with listening(TRANSPORTS["unix"]) as listener, connected(listener) as ends:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, hard))
        try:
            for _ in range(3):
                np.testing.assert_array_equal(pass_on(*ends, value), value)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caplog.text.count("No shared memory") == 1
        assert ends[0]._shared._outgoing.num_bytes == 0
        np.testing.assert_array_equal(pass_on(*ends, value), value)
        assert ends[0]._shared._outgoing.num_bytes > 0


def test_messages_past_the_bound_still_arrive(caplog):
    limits = MessageLimits(shared_bytes=2 * MIB)
    row = TRANSPORTS["unix"]
    with (
        listening(row, shared_bytes=2 * MIB) as listener,
        connected(listener, limits) as ends,
    ):
        kept = [pass_on(*ends, np.full(MIB // 4, n, np.float32)) for n in range(8)]
        assert [int(array.max()) for array in kept] == [*range(8)]
    assert caplog.text.count("No shared memory") == 1


def send_without_end(sender, value, *, timeout_s=LONG_S):
    while True:
        sender.send(1, 1, value, timeout_s=timeout_s)


def test_who_does_not_read_pins_little_and_its_sender_waits():
    with listening(TRANSPORTS["unix"]) as listener, connected(listener) as ends:
        sender, receiver = ends
        array = np.zeros(MIB, np.uint8)
        with pytest.raises(CallTimeoutError, match="does not read"):
            send_without_end(sender, array, timeout_s=SHORT_S)
        pinned = len(sender._shared._outgoing._lent)
        assert 0 < pinned * MIB <= UNREAD_BYTES
        for _ in range(pinned):
            receiver.receive(timeout_s=LONG_S)
        assert pass_on(*ends, array).nbytes == MIB


@pytest.mark.parametrize("gone", ["sender", "receiver"])
def test_who_waits_for_a_reader_hears_that_an_end_is_closed(gone):
    with listening(TRANSPORTS["unix"]) as listener, connected(listener) as ends:
        sender, receiver = ends
        with ThreadPoolExecutor(1) as pool:
            promise = pool.submit(send_without_end, sender, np.zeros(MIB, np.uint8))
            wait_until(
                lambda: len(sender._shared._outgoing._lent) * MIB == UNREAD_BYTES
            )
            (sender if gone == "sender" else receiver).close()
            with pytest.raises(ConnectionLostError):
                promise.result(LONG_S)


def test_a_message_past_the_bound_alone_need_not_wait():
    with listening(TRANSPORTS["unix"]) as listener, connected(listener) as ends:
        array = np.zeros(UNREAD_BYTES + MIB, np.uint8)
        for _ in range(3):
            assert pass_on(*ends, array).nbytes == array.nbytes


def test_the_smaller_bound_of_both_ends_holds():
    with (
        listening(TRANSPORTS["unix"], shared_bytes=2 * MIB) as listener,
        connected(listener, MessageLimits()) as ends,
    ):
        kept = [pass_on(*ends, np.full(MIB // 4, n, np.float32)) for n in range(4)]
        assert len(kept) == 4
        assert ends[0]._shared._outgoing.num_bytes <= 2 * MIB


# Lies.


def sealed(size, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if IS_AVAILABLE else 0):
    descriptor = os.memfd_create("lie", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def attach(number, size):
    return struct.pack("<cIQ", b"A", number, size)


def refused(pair, *, where=Where(0, 0, 0, 1), size=SIZE):  # noqa: B008
    with pytest.raises(DecodeError) as caught:
        pair.receiver.open(where, size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "told", "reason"),
    [
        (lambda: sealed(MIB), 2 * MIB, "must be of"),
        (lambda: sealed(2 * MIB), MIB, "must be of"),
        (lambda: sealed(MIB), 2**64 - 1, "at most"),
        (lambda: sealed(MIB), 65 * MIB, "at most"),
        (lambda: sealed(0), 0, "at most"),
        (lambda: sealed(MIB, fcntl.F_SEAL_GROW), MIB, "sealed"),
        (lambda: sealed(MIB, fcntl.F_SEAL_SHRINK), MIB, "sealed"),
        (lambda: sealed(MIB, 0), MIB, "sealed"),
        (lambda: os.open("/dev/zero", os.O_RDWR), MIB, "memory file"),
        (lambda: os.open(__file__, os.O_RDONLY), MIB, "memory file"),
    ],
)
def test_segments_that_are_not_as_told_are_refused(pair, make, told, reason):
    descriptor = make()
    socket.send_fds(pair.channels[0], [attach(0, told)], [descriptor])
    os.close(descriptor)
    assert reason in refused(pair)


@pytest.mark.parametrize(
    "text", [b"junk", b"D\0\0\0\0", b"D\0", attach(0, 9), b"A" + bytes(40)]
)
def test_what_is_no_word_of_the_protocol_is_refused(pair, text):
    pair.channels[0].send(text)
    refused(pair)


def test_a_segment_comes_once(pair):
    for _ in range(2):
        descriptor = sealed(MIB)
        socket.send_fds(pair.channels[0], [attach(0, MIB)], [descriptor])
        os.close(descriptor)
    refused(pair)


def test_a_segment_in_use_cannot_be_taken_away(pair):
    view = pair.pass_on(3)
    pair.channels[0].send(struct.pack("<cI", b"D", 0))
    assert "in use" in refused(pair, where=Where(9, 0, 9, 1))
    assert view[0] == 3


@pytest.mark.parametrize(
    ("where", "size"),
    [
        (Where(0, 0, 1, 1), 16 * MIB + 1),
        (Where(0, 0, 1, 1), 2**64 - 1),
        (Where(0, 16 * MIB, 1, 1), 1),
        (Where(0, 2**64 - mmap.PAGESIZE, 1, 1), 2 * mmap.PAGESIZE),
        (Where(0, 1, 1, 1), 1),
        (Where(0, 0, 1 << 10, 1), 1),
        (Where(0, 0, 2**32 - 1, 1), 1),
        (Where(1, 0, 1, 1), 1),
    ],
)
def test_places_outside_of_a_segment_are_refused(pair, where, size):
    pair.pass_on(1)
    refused(pair, where=where, size=size)


def test_a_slot_in_use_cannot_be_sent_again(pair):
    where = pair.place(1)
    view = pair.receiver.open(where, SIZE)
    assert "still in use" in refused(pair, where=where)
    assert view[0] == 1


def test_a_broken_protocol_closes_the_connection():
    with sharing() as pair, raw_peer(shared=pair.receiver) as (connection, peer):
        pair.channels[0].send(b"junk")
        where = Where(0, 0, 0, 1)
        peer.sendall(frame_with_shared_body(1, 1, b"\xc0", num_bytes=9, where=where))
        with pytest.raises(ConnectionLostError, match="sent an invalid message"):
            connection.receive(timeout_s=LONG_S)


def test_nobody_can_shrink_grow_or_overwrite_a_segment(pair):
    where = pair.place(1)
    segment = pair.sender._outgoing._segments[where.segment]
    for size in (0, 32 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.descriptor, size)
    with pytest.raises(PermissionError):
        mmap.mmap(segment.descriptor, MIB)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


# Ends.


def test_views_outlive_both_ends():
    with sharing() as pair:
        array = np.frombuffer(pair.pass_on(7), np.uint8)
    del pair
    gc.collect()
    assert (array == 7).all()


def test_a_closed_end_places_and_opens_nothing(pair):
    where = pair.place(1)
    pair.close()
    assert pair.place(1) is None
    refused(pair, where=where)
    pair.sender.take_back(where)


def test_nothing_is_left_open_or_mapped():
    before = len(memory_files())  # of servers whose threads are going home
    with listening(TRANSPORTS["unix"]) as listener, connected(listener) as ends:
        array = pass_on(*ends, np.ones(MIB))
        assert pass_on(*ends[::-1], np.ones(MIB)).sum() == MIB
        assert len(memory_files()) > before
    assert array.sum() == MIB
    del array, ends
    assert len(memory_files()) <= before


CHILD = """
import sys
import numpy as np
from replicator.rpc.transports.connect import listen
listener = listen(sys.argv[1])
print("listening", flush=True)
connection = listener.accept()()
kept = []
while True:
    kept.append(connection.receive(timeout_s=60).payload.take())
    connection.send(2, 1, kept[-1], timeout_s=60)
"""


@pytest.mark.slow
def test_a_killed_peer_leaves_nothing_behind(tmp_path):
    tmp_path.chmod(0o700)
    assert memory_files() == []
    in_shm = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-c", CHILD, f"unix:{tmp_path}/socket"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "listening\n"
        connection = connect(f"unix:{tmp_path}/socket", timeout_s=LONG_S)
        kept = []
        for number in range(5):
            connection.send(1, 1, np.full(MIB, float(number)), timeout_s=LONG_S)
            kept.append(connection.receive(timeout_s=LONG_S).payload.take())
        child.send_signal(signal.SIGKILL)
        child.wait(LONG_S)
    with pytest.raises(ConnectionLostError):
        connection.receive(timeout_s=LONG_S)
    assert [int(array[-1]) for array in kept] == [*range(5)]
    connection.close()
    del connection, kept
    wait_until(lambda: memory_files() == [])
    # Other processes of this machine may have something there for a moment.
    wait_until(lambda: set(os.listdir("/dev/shm")) <= in_shm)


def test_who_asks_for_a_slot_after_close_gets_the_socket():
    with listening(TRANSPORTS["unix"]) as listener, connected(listener) as ends:
        ends[0]._shared.close()
        assert pass_on(*ends, np.ones(MIB)).sum() == MIB


def test_size_classes_are_few_and_waste_little():
    for num_bytes in range(MIB, 40 * MIB, 77_777):
        assert num_bytes <= size_class(num_bytes) <= 1.25 * num_bytes
    sizes = {size_class(num_bytes) for num_bytes in range(32_768, MIB, 1000)}
    assert sizes == {1 << bits for bits in range(15, 21)}
