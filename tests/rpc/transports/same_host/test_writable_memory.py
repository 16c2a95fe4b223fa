"""A peer can write what it has sent by shared memory: what could harm is copied."""

import contextlib
import dataclasses

import ml_dtypes
import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.rpc.client.client import Client
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.server.server import Server
from replicator.rpc.transports.same_host.sealed_memory import IS_AVAILABLE
from tests.rpc.transports.ends import LIMITS, TRANSPORTS, connected, listening, pass_on

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="no memfd here")

SIZE = 50_000
FLOATS = ["f2", "f4", "f8", ">f4", "g", "c8", "c16", "bfloat16", "float8_e4m3fn"]
FLOATS += [[("a", "f4"), ("b", "c8", (2,))]]
OTHERS = ["?", "i1", "u2", "i4", "u8", ">i4", "S7", "U3", "V4", "M8[s]", "m8[us]"]
OTHERS += ["int4", "uint4", [("a", "f8"), ("b", "i4")], [("a", [("b", "?", (3,))])]]


def dtype_of(name):
    known = getattr(ml_dtypes, name, None) if isinstance(name, str) else None
    return np.dtype(known or name)


def lies_in_shared_memory(array):
    address = array.__array_interface__["data"][0]
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return "memfd:replicator-rpc" in line
    return False


class Node:
    """Tells where its arguments lie."""

    def where(self, array):
        return lies_in_shared_memory(array)

    def ones(self, dtype):
        return np.ones(SIZE, dtype)


@contextlib.contextmanager
def ends(trusted_memory=False):
    limits = dataclasses.replace(LIMITS, trusted_memory=trusted_memory)
    row = TRANSPORTS["unix"]
    with (
        listening(row, trusted_memory=trusted_memory) as listener,
        connected(listener, limits) as both,
    ):
        yield both


@pytest.mark.parametrize("is_reply", [False, True])
@pytest.mark.parametrize("wrap", [lambda array: array, lambda array: {"x": [array, 1]}])
@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_what_is_no_float_is_copied(dtype, wrap, is_reply):
    value = wrap(np.zeros(SIZE, dtype_of(dtype)))
    with ends() as both:
        found = pass_on(*(both[::-1] if is_reply else both), value)
        array = found if isinstance(found, np.ndarray) else found["x"][0]
        assert array.dtype == dtype_of(dtype)
        assert not lies_in_shared_memory(array)
        assert not array.flags.writeable
        assert array.ctypes.data % 64 == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_used_where_they_lie(dtype):
    with ends() as both:
        assert lies_in_shared_memory(pass_on(*both, np.zeros(SIZE, dtype_of(dtype))))


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
def test_all_are_where_memory_is_trusted(dtype):
    with ends(trusted_memory=True) as both:
        assert lies_in_shared_memory(pass_on(*both, np.zeros(SIZE, dtype_of(dtype))))


def test_an_index_stays_what_it_was_though_its_sender_writes():
    index, table = np.arange(SIZE), np.zeros(SIZE)
    with ends() as (client, server):
        received = pass_on(client, server, [index, np.zeros(SIZE)])
        (segment,) = client._shared._outgoing._segments.values()
        segment.memory[:] = b"\x7f" * len(segment.memory)
        table[received[0]] = 1.0
        assert table.all()
        assert received[1].all(), "floats are those of the sender"


def test_order_and_layout_of_a_copy_are_those_of_the_array():
    arrays = [np.arange(SIZE).reshape(100, -1).T, np.arange(SIZE).reshape(50, 10, -1)]
    with ends() as both:
        for found, array in zip(pass_on(*both, arrays), arrays, strict=True):
            np.testing.assert_array_equal(found, array)
            assert found.strides == array.strides


@pytest.mark.parametrize("is_trusted", [False, True])
def test_both_sides_of_a_call_trust_as_they_are_told(is_trusted):
    limits = MessageLimits(trusted_memory=is_trusted)
    with (
        Server(Node(), address="unix:", limits=limits) as server,
        Client(server.address, limits=limits) as client,
    ):
        assert client.where(np.ones(SIZE, np.int32)) == is_trusted
        assert lies_in_shared_memory(client.ones("i4")) == is_trusted
        assert client.where(np.ones(SIZE, np.float32))
        assert lies_in_shared_memory(client.ones("f4"))


class Asking:
    def __init__(self, node, is_trusted):
        self.node, self.is_trusted = node, is_trusted

    def run(self):
        assert self.node.where(np.ones(SIZE, np.int32)) == self.is_trusted
        found = lies_in_shared_memory(self.node.ones("i4"))
        assert found == self.is_trusted
        lp.stop()


@pytest.mark.slow
@pytest.mark.parametrize("is_trusted", [False, True])
def test_a_program_trusts_as_it_is_told(is_trusted):
    program = lp.Program("trust", trusted_memory=is_trusted)
    with program.group("node"):
        handle = program.add_node(lp.CourierNode(Node))
    with program.group("asking"):
        program.add_node(lp.PyClassNode(Asking, handle, is_trusted))
    lp.launch(program, "processes").wait()
