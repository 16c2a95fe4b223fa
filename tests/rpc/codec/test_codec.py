"""What is sent arrives: every type, bit for bit, without needless copies."""

import collections
import dataclasses
import datetime
import enum
import gc
import threading
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from benchmarks.rpc_fuzz.values import (
    DTYPES,
    REGISTRY,
    Access,
    Color,
    Derived,
    Frozen,
    Level,
    Point,
    RandomValues,
    is_same,
)
from replicator.rpc.codec.codec import decode, encode
from replicator.rpc.codec.no_argument_calls import NoArgumentCall
from replicator.rpc.codec.registry import Registry
from replicator.rpc.codec.wire_format import ALIGNMENT, SINGLE_ARRAY, lay_out

DAY = datetime.date(2026, 2, 28)
NOON = datetime.datetime(2026, 2, 28, 12, 0, 1, 5, fold=1)
ZONE = datetime.timezone(datetime.timedelta(hours=-3, minutes=-30), "NST")

PLAIN = {
    "none": None,
    "true": True,
    "zero": 0,
    "smallest of 64 bits": -(2**63),
    "largest of 64 bits": 2**64 - 1,
    "65 bits": 2**64,
    "negative beyond 64 bits": -(2**63) - 1,
    "10,000 bits": -(3**6000),
    "float": 0.1,
    "negative zero": -0.0,
    "complex": complex(-0.0, float("inf")),
    "text": "naïve 😀\0",
    "half of a pair": "\ud800",
    "long text": "é" * 50_000,
    "bytes": b"\0\xff",
    "long bytes": b"ab" * 50_000,
    "ellipsis": ...,
    "list": [1, [2, []]],
    "tuple": (1, (2, ())),
    "dict": {"b": 1, "a": {}},
    "keys of many types": {1: 0, (2, (3,)): 0, None: 0, b"": 0, 0.5: 0, DAY: 0},
    "ordered": collections.OrderedDict(b=1, a=2),
    "set": {1, "a", (2, 3)},
    "frozenset": frozenset({frozenset(), 1}),
    "range": range(5, -(2**70), -2),
    "slice": slice(None, ..., (1, 2)),
    "date": DAY,
    "datetime": NOON,
    "utc": NOON.replace(tzinfo=datetime.UTC),
    "named zone": NOON.replace(tzinfo=ZONE),
    "timedelta": datetime.timedelta(-1, 2, 3),
    "named tuple": Point(1, [2]),
    "dataclass": Frozen((1,), b={}),
    "derived field": Derived("x"),
    "enum": [*Color, *Level],
    "flags": [Access.READ, Access.READ | Access.RUN, Access(0)],
    "mixed": ("f", (Point(1, {"k": [Frozen(1)]}),), {"k": {1}}, 60.0),
}

SCALARS = {
    "float32": np.float32(0.1),
    "float64": np.float64(-0.0),
    "longdouble": np.longdouble(1) / 3,
    "int8": np.int8(-1),
    "bool": np.bool(True),
    "complex64": np.complex64(1 - 2j),
    "bfloat16": ml_dtypes.bfloat16(1.5),
    "float8": ml_dtypes.float8_e4m3fn(1.5),
    "datetime": np.datetime64("2026-02-28T12", "h"),
    "not a time": np.datetime64("NaT", "ns"),
    "duration": np.timedelta64(3, "25s"),
    "text": np.str_("a\0"),
    "no text": np.str_(""),
    "bytes": np.bytes_(b"a\0"),
    "void": np.void(b"abc"),
    "record": np.array((1, 2.5), "i4,f8")[()],
}

ARRAYS = {
    "empty": np.zeros((0, 3)),
    "zero-dim": np.array(1.5),
    "zero-dim of text": np.array("abc"),
    "rank 32": np.ones((1,) * 32),
    "rows": np.arange(12.0).reshape(3, 4)[::2],
    "backwards": np.arange(5)[::-1],
    "columns": np.arange(12.0).reshape(3, 4).T,
    "Fortran": np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
    "broadcast": np.broadcast_to(np.float32(2), (3, 4)),
    "big-endian": np.arange(5, dtype=">i4"),
    "bfloat16": np.arange(5).astype(ml_dtypes.bfloat16),
    "times": np.array(["2026", "NaT"], "M8[25s]"),
    "text": np.array(["a", "€uro"]),
    "records": np.array([(1, (2.0, 3.0))], [("a", "i1"), ("b", ">f4", (2,))]),
    "padded": np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "float0": np.zeros((2, 3), jax.dtypes.float0),
    "long": np.arange(100_000.0),
    "long Fortran": np.asfortranarray(np.arange(10_000.0).reshape(100, 100)),
    "long and strided": np.arange(20_000.0)[::2],
    "long text": np.array(["abc"] * 3000),
}


def send(value, **kwargs):
    kwargs = {"registry": REGISTRY} | kwargs
    head, buffers, _ = encode(value, **kwargs)
    return decode(head, in_one_piece(buffers), **kwargs)


def in_one_piece(buffers, *, shift=0):
    offsets, size = lay_out(buffers)
    body = bytearray(shift + size)
    for offset, buffer in zip(offsets, buffers, strict=True):
        body[shift + offset : shift + offset + len(buffer)] = buffer
    return memoryview(body)[shift:]


@pytest.mark.parametrize("value", [*PLAIN.values()], ids=PLAIN)
def test_plain_values_arrive_as_they_were(value):
    assert is_same(value, send(value))


@pytest.mark.parametrize("value", [*SCALARS.values()], ids=SCALARS)
def test_numpy_scalars_stay_numpy_scalars(value):
    assert is_same(value, send(value))


@pytest.mark.parametrize("value", [*ARRAYS.values()], ids=ARRAYS)
def test_arrays_arrive_as_they_were(value):
    assert is_same(value, send(value))


@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
def test_dtypes_arrive_as_they_were(dtype):
    assert send(dtype) == dtype


@pytest.mark.parametrize("seed", range(4))
def test_values_at_random_arrive_as_they_were(seed):
    values = RandomValues(seed)
    for _ in range(1000):
        value = values.value()
        assert is_same(value, send(value))


def test_a_body_in_one_piece_is_read_where_lay_out_puts_the_buffers():
    values = RandomValues(9)
    value = [values.value() for _ in range(900)]
    head, buffers, _ = encode(value, registry=REGISTRY)
    assert len(buffers) > 10
    body = in_one_piece(buffers)
    assert is_same(value, decode(memoryview(head), body, registry=REGISTRY))


def test_nan_keeps_its_payload():
    payload = np.array([0x7FF0_0000_0000_0BAD, 0xFFF8_0000_0000_0001], np.uint64)
    value = payload.view(np.float64)
    assert send(value).tobytes() == payload.tobytes()
    assert is_same(value[1].item(), send(value[1].item()))


def test_bytes_that_may_change_arrive_as_bytes():
    assert send([bytearray(b"ab"), memoryview(b"cd")]) == [b"ab", b"cd"]


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_long_bytes_arrive_wherever_they_lie(make):
    data = bytes(range(256)) * 100
    long = make(data)
    value = ("put", (long, np.ones(5000), [np.zeros(600), {"a": [long]}]), {"k": long})
    method, args, kwargs = send(value)
    assert (method, args[0], args[2][1], kwargs) == (
        "put",
        data,
        {"a": [data]},
        {"k": data},
    )
    assert args[1].sum() == 5000
    assert args[2][0].sum() == 0


def test_long_bytes_are_not_in_the_head():
    long = bytes(10_000_000)
    call, deep = ["put", [long], None, 60.0], {"a": ({"b": long[:99_999]},)}
    for value in (long, call, ["put", None, {"a": long}, 60.0], ("put", long), deep):
        head, buffers, num_bytes = encode(value)
        assert len(head) < 100
        assert num_bytes == len(head) + sum(map(len, buffers))
        assert decode(head, in_one_piece(buffers)) == value


def test_jax_arrays_arrive_as_numpy_arrays():
    sent = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)}
    found = send(sent)
    assert is_same(found, {name: np.asarray(array) for name, array in sent.items()})


def test_a_replicated_jax_array_arrives_once(mesh):
    everywhere = jax.NamedSharding(mesh, jax.P())
    array = jax.device_put(jnp.arange(5000.0), everywhere)
    head, buffers, _ = encode(array)
    assert [len(buffer) for buffer in buffers] == [20_000]
    assert np.array_equal(decode(head, in_one_piece(buffers)), np.arange(5000.0))


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_arrive_as_keys(implementation):
    keys = jax.random.split(jax.random.key(3, impl=implementation), 4)
    found = send({"keys": keys, "one": keys[0]})
    assert is_same(found, {"keys": keys, "one": keys[0]})


def test_a_memory_mapped_array_arrives(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(9.0))
    found = send(np.load(tmp_path / "a.npy", mmap_mode="r"))
    assert is_same(found, np.arange(9.0))


def test_long_arrays_are_not_copied():
    sent = np.zeros(5000)
    head, buffers, _ = encode({"a": sent})
    assert np.shares_memory(sent, np.frombuffer(buffers[0], np.uint8))
    body = in_one_piece(buffers)
    assert np.shares_memory(decode(head, body)["a"], np.frombuffer(body, np.uint8))


@pytest.mark.parametrize("size", [3, 5000])
def test_arrays_arrive_read_only(size):
    sent = np.zeros(size)
    head, buffers, _ = encode(sent)
    found = decode(head, in_one_piece(buffers))
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        found.setflags(write=True)


def test_a_view_keeps_the_body_alive_and_nothing_else_does():
    class Memory(bytearray):
        """Bytes that can be watched."""

    head, buffers, _ = encode([np.arange(1000.0), np.arange(2000.0)])
    memory = Memory(in_one_piece(buffers))
    watched = weakref.ref(memory)
    first, second = decode(head, memoryview(memory))
    del memory, first
    gc.collect()
    assert watched() is not None
    assert second[-1] == 1999
    del second
    gc.collect()
    assert watched() is None


def test_memory_that_a_view_lies_in_cannot_be_closed_or_resized():
    head, buffers, _ = encode([np.arange(1000.0), np.arange(700.0)])
    memory = bytearray(in_one_piece(buffers))
    found = decode(head, memoryview(memory))
    with pytest.raises(BufferError):
        memory.clear()
    del found
    memory.clear()


def test_a_body_may_lie_anywhere_in_memory():
    sent = [np.arange(1000.0), np.arange(700).astype(ml_dtypes.bfloat16)]
    head, buffers, _ = encode([*sent, np.arange(999) > 5])
    found = decode(head, in_one_piece(buffers, shift=3))
    assert is_same(found[:2], sent)


def test_buffers_are_laid_out_at_multiples_of_64():
    buffers = [memoryview(bytes(size)) for size in (1, 64, 65, 4096)]
    assert lay_out(buffers) == ([0, 64, 128, 256], 4352)
    assert lay_out([]) == ([], 0)
    assert ALIGNMENT == 64


def test_small_messages_have_no_buffers_and_large_ones_small_heads():
    small = encode([np.zeros(128)] * 20)
    large = encode([np.zeros(128)] * 2000)
    assert not small.buffers
    assert len(large.buffers) > 1700
    assert len(large.head) < 300_000


def test_nothing_of_memory_between_fields_is_sent():
    padded = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    sent = np.frombuffer(b"\xaa" * 16 * 600, padded)[::2]
    (buffer,) = encode(sent).buffers
    assert bytes(buffer[1:8]) in (bytes(7), b"\xaa" * 7)  # ours or the sender's array


def test_a_class_may_have_another_name_at_each_end():
    class Here(enum.Enum):
        A = 1

    class There(enum.Enum):
        A = 2

    ours, theirs = Registry(), Registry()
    ours.register(Here, "Letter")
    theirs.register(There, "Letter")
    assert decode(encode(Here.A, registry=ours).head, registry=theirs) is There.A


def test_what_post_init_did_is_not_done_again():
    @dataclasses.dataclass
    class Doubled:
        x: int

        def __post_init__(self):
            self.x *= 2

    registry = Registry()
    registry.register(Doubled)
    assert send(Doubled(2), registry=registry).x == 4


def test_threads_do_not_disturb_each_other():
    failed = []

    def work(seed):
        values = RandomValues(seed)
        for _ in range(150):
            value = values.value()
            if not is_same(value, send(value)):
                failed.append(value)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(20, 26)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("size", [0, 3, 500, 5000])
@pytest.mark.parametrize("as_head", [bytes, lambda head: memoryview(b" " + head)[1:]])
def test_an_array_that_is_all_arrives_aligned_and_without_msgpack(size, as_head):
    array = np.arange(size, dtype=np.float64)
    encoded = encode(array)
    assert encoded.head[0] == SINGLE_ARRAY
    got = decode(as_head(encoded.head), in_one_piece(encoded.buffers))
    assert np.array_equal(got, array)
    assert got.flags.aligned
    assert not got.flags.writeable


@pytest.mark.parametrize("size", [0, 3, 500, 5000])
@pytest.mark.parametrize("timeout_s", [None, 60, 60.0, 0.0, -0.0, 2**40])
@pytest.mark.parametrize("as_head", [bytes, lambda head: memoryview(b" " + head)[1:]])
def test_a_call_of_one_array_arrives_as_it_was(size, timeout_s, as_head):
    value = ["push", [np.arange(size, dtype=np.float64)], None, timeout_s]
    encoded = encode(value)
    got = decode(as_head(encoded.head), in_one_piece(encoded.buffers))
    assert is_same(value, got)
    assert got[1][0].flags.aligned
    assert not got[1][0].flags.writeable
    assert encoded.num_bytes == len(encoded.head) + sum(map(len, encoded.buffers))


@pytest.mark.parametrize("timeout_s", [None, 60, 60.0, 0.1])
@pytest.mark.parametrize("as_head", [bytes, lambda head: memoryview(b" " + head)[1:]])
def test_a_bare_call_arrives_as_it_was(timeout_s, as_head):
    call = NoArgumentCall("stop", None, None, timeout_s)
    for _ in range(2):  # the second comes from memory
        head, buffers, num_bytes = encode(call)
        assert is_same(call, decode(as_head(head), in_one_piece(buffers)))
    assert num_bytes == len(head)
    assert not buffers


@pytest.mark.parametrize(
    "call",
    [
        NoArgumentCall("s" * 300, None, None, 60.0),
        NoArgumentCall("stop", None, None, 0.0),
        NoArgumentCall("stop", None, None, -0.0),
        NoArgumentCall("stop", None, None, float("nan")),
        NoArgumentCall("stop", None, None, 2**40),
    ],
)
def test_a_bare_call_that_wants_care_arrives_as_a_list(call):
    head, buffers, _ = encode(call)
    assert is_same([*call], decode(head, in_one_piece(buffers)))


def test_a_bare_call_with_half_of_a_pair_arrives_as_it_was():
    call = NoArgumentCall("\ud800", None, None, 60.0)
    assert is_same(call, decode(encode(call).head))


@pytest.mark.parametrize("args", [None, [np.ones(3)]])
def test_deadlines_that_come_once_fill_no_memory(args):
    def send(timeout_s):
        call = ["push", args, None, timeout_s]
        encoded = encode(
            call if args else NoArgumentCall("stop", None, None, timeout_s)
        )
        decode(encoded.head, in_one_piece(encoded.buffers))

    tracemalloc.start()
    try:
        for number in range(5000):
            send(1.0 + number / 5000)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 500_000


def test_a_list_like_a_bare_call_arrives_as_a_list():
    call = ["stop", None, None, 60.0]
    assert is_same(call, decode(encode(call).head))


LIKE_A_CALL_OF_ONE = {
    "no arguments": ["stop", None, None, 60.0],
    "no arguments, by name": ["stop", None, {}, 60.0],
    "no arguments of no method": [None, None, None, 60.0],
    "no arguments, a long name": ["s" * 300, None, None, 60.0],
    "no arguments, half of a pair": ["\ud800", None, None, 60.0],
    "no arguments, a truth as its time": ["stop", None, None, True],
    "no arguments, nan as its time": ["stop", None, None, float("nan")],
    "arguments by name": ["push", [np.ones(3)], {"a": 1}, 60.0],
    "two arguments": ["push", [np.ones(3), np.ones(3)], None, 60.0],
    "a tuple": ["push", (np.ones(3),), None, 60.0],
    "no method": [None, [np.ones(3)], None, 60.0],
    "a truth as its time": ["push", [np.ones(3)], None, True],
    "nan as its time": ["push", [np.ones(3)], None, float("nan")],
    "more": ["push", [np.ones(3)], None, 60.0, 0],
    "a long name": ["p" * 300, [np.ones(3)], None, 60.0],
    "half of a pair": ["\ud800", [np.ones(3)], None, 60.0],
    "every other element": ["push", [np.ones(9)[::2]], None, 60.0],
    "in Fortran's order": ["push", [np.ones((3, 9), order="F")], None, 60.0],
    "a scalar": ["push", [np.float32(1)], None, 60.0],
}


@pytest.mark.parametrize("value", LIKE_A_CALL_OF_ONE.values(), ids=LIKE_A_CALL_OF_ONE)
def test_what_is_nearly_a_call_of_one_array_arrives_as_it_was(value):
    encoded = encode(value)
    assert is_same(value, decode(encoded.head, in_one_piece(encoded.buffers)))
