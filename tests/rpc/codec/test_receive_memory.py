"""Warm memory is lent again when nobody sees it any more, never before."""

import threading

import numpy as np
import pytest

from replicator.rpc.codec.receive_memory import receive_memory

MIB = 1 << 20


def address_of(view):
    return np.frombuffer(view, np.uint8).ctypes.data


def test_memory_is_lent_again_when_its_last_view_died():
    view = receive_memory(3 * MIB)
    address = address_of(view)
    part = np.frombuffer(view.toreadonly(), np.float32)[5:9].reshape(2, 2)
    del view
    other = receive_memory(3 * MIB)
    assert address_of(other) != address
    del part
    assert address_of(receive_memory(3 * MIB)) == address


@pytest.mark.parametrize("num_bytes", [1, 4096, 65_536, 100_001, 3 * MIB + 1])
def test_memory_has_the_size_asked_for_and_is_aligned(num_bytes):
    view = receive_memory(num_bytes)
    assert len(view) == num_bytes
    assert not view.readonly
    assert address_of(view) % 64 == 0


def test_threads_never_share_memory():
    failures = []

    def fill(number):
        for _ in range(300):
            array = np.frombuffer(receive_memory(MIB), np.uint8)
            array[:] = number
            if not (array == number).all():
                failures.append(number)

    threads = [threading.Thread(target=fill, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
