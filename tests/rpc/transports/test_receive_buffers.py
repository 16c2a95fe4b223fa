"""Warm memory is lent again when nobody sees it any more, never before."""

import threading

import numpy as np
import pytest

from replicator.rpc.transports.receive_buffers import ReceiveBuffers, size_class

MIB = 1 << 20


def address_of(view):
    return np.frombuffer(view, np.uint8).ctypes.data


def test_memory_is_lent_again_when_its_last_view_died():
    buffers = ReceiveBuffers()
    view = buffers.lend(MIB)
    address = address_of(view)
    part = np.frombuffer(view.toreadonly(), np.float32)[5:9].reshape(2, 2)
    del view
    other = buffers.lend(MIB)
    assert address_of(other) != address
    del part
    assert address_of(buffers.lend(MIB)) == address


@pytest.mark.parametrize("num_bytes", [1, 4096, 65_536, 100_001, 3 * MIB + 1])
def test_memory_has_the_size_asked_for_and_is_aligned(num_bytes):
    view = ReceiveBuffers().lend(num_bytes)
    assert len(view) == num_bytes
    assert not view.readonly
    assert address_of(view) % 64 == 0


def test_messages_of_about_the_same_size_share_a_buffer():
    buffers = ReceiveBuffers()
    first = address_of(buffers.lend(MIB + 1))
    assert address_of(buffers.lend(MIB + 50_000)) == first


def test_the_pool_keeps_no_more_than_its_bound():
    buffers = ReceiveBuffers(max_bytes=4 * MIB)
    views = [buffers.lend(MIB) for _ in range(20)]
    assert buffers.kept_bytes <= 4 * MIB
    views[3][:] = b"x" * MIB
    assert bytes(views[4][:1]) != b"x"
    views.clear()
    buffers.lend(3 * MIB)
    assert buffers.kept_bytes <= 4 * MIB


def test_idle_memory_makes_room_for_other_sizes():
    buffers = ReceiveBuffers(max_bytes=4 * MIB)
    for _ in range(3):
        buffers.lend(MIB)
    first = address_of(buffers.lend(4 * MIB))
    assert address_of(buffers.lend(4 * MIB)) == first


def test_what_is_larger_than_the_pool_is_not_kept():
    buffers = ReceiveBuffers(max_bytes=MIB)
    assert len(buffers.lend(2 * MIB)) == 2 * MIB
    assert buffers.kept_bytes == 0


def test_threads_never_share_memory():
    buffers = ReceiveBuffers(max_bytes=MIB)
    failures = []

    def fill(number):
        for _ in range(300):
            view = buffers.lend(100_000)
            array = np.frombuffer(view, np.uint8)
            array[:] = number
            if not (array == number).all():
                failures.append(number)

    threads = [threading.Thread(target=fill, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_size_classes_are_few_and_waste_little():
    for num_bytes in range(MIB, 40 * MIB, 77_777):
        assert num_bytes <= size_class(num_bytes) <= 1.25 * num_bytes
    sizes = {size_class(num_bytes) for num_bytes in range(32_768, MIB, 1000)}
    assert sizes == {1 << bits for bits in range(15, 21)}
