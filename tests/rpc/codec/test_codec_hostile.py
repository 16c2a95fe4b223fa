"""Whatever arrives, decoding returns a value or raises one of two errors, and soon."""

import dataclasses
import os
import pickle
import random
import struct
import subprocess
import sys
import time
import tracemalloc

import jax
import numpy as np
import pytest
from msgpack import ExtType, Timestamp, packb

from benchmarks.rpc_fuzz.values import REGISTRY, Color, Frozen, Point, is_same
from replicator.errors import DecodeError, MessageTooLargeError
from replicator.rpc.codec import wire_format
from replicator.rpc.codec.codec import decode, encode
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.no_argument_calls import NoArgumentCall
from replicator.rpc.codec.registry import Registry
from replicator.rpc.codec.wire_format import in_one_piece

ERRORS = (DecodeError, MessageTooLargeError)
RICH = (
    "act",
    (np.arange(6.0).reshape(2, 3), {"k": [Point(1, Frozen("x")), Color.RED]}),
    {"a": {1, 2}, "b": np.float32(1), "c": 2**70, "d": np.array(["text", "x"])},
    60.0,
)


def tag(letter):
    return ExtType(wire_format.TAG, letter)


def tagged(letter, *parts):
    return packb([tag(letter), *parts])


def array(description, *shape, order=0, data=b"", code=wire_format.SHORT_ARRAY):
    header = packb([description, order, *shape])
    return packb(ExtType(code, data + header + bytes([len(header) % 256])))


LONE = bytes([wire_format.SINGLE_ARRAY, 0])
CALL = bytes([wire_format.SINGLE_ARRAY])


def lone(description, *shape, data=b"", code=wire_format.SHORT_ARRAY, start=LONE):
    header = packb([description, 0, *shape])
    return start + bytes([code]) + data + header + bytes([len(header)])


def bare_call(*call):
    return wire_format.NO_ARGUMENTS + packb(call)


def call_of_one(*call):
    packed = call[0] if isinstance(call[0], bytes) else packb(call)
    start = CALL + bytes([len(packed)]) + packed
    return lone("<f4", 1, data=bytes(4), start=start)


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_not_executed(tmp_path, protocol):
    path = str(tmp_path / "executed")
    payload = pickle.dumps(Canary(path), protocol)
    objects = np.array([Canary(path)], object)
    heads = [
        payload,
        packb(payload),
        tagged(b"O", payload),
        tagged(b"O", "os.mkdir", path),
    ]
    heads += [packb(ExtType(code, payload)) for code in range(128)]
    heads += [tagged(bytes([letter]), payload) for letter in range(256)]
    heads += [
        array("|O8", 1, data=payload),
        objects.dumps(),
        tagged(b"O", "os", "mkdir"),
    ]
    for head in heads:
        try:
            decode(head, memoryview(payload), registry=REGISTRY)
        except ERRORS:
            continue
    assert not os.path.exists(path)


BOMBS = {
    "list of 2^32": b"\xdd\xff\xff\xff\xff",
    "dictionary of 2^32": b"\xdf\xff\xff\xff\xff",
    "lists of 2^16 in each other": b"\xdc\xff\xff" * 21_000,
    "lists of 2^32 in each other": b"\xdd\xff\xff\xff\xff" * 1000,
    "dictionaries in each other": b"\xdf\xff\xff\xff\xff\x00" * 1000,
    "short lying lists": b"\xdc\x07\xff" * 682,
    "text of 2^32": b"\xdb\xff\xff\xff\xff",
    "bytes of 2^32": b"\xc6\xff\xff\xff\xff",
    "extension of 2^32": b"\xc9\xff\xff\xff\xff\x01",
    "a million deep": b"\x91" * 1_000_000 + b"\xc0",
    "a million dictionaries deep": b"\x81\x01" * 500_000 + b"\xc0",
    "array of 2^62": array("<f4", 2**31, 2**31),
    "array of 2^62 in the body": array("<f4", 2**31, 2**31, code=wire_format.ARRAY),
    "array of 2^64": array("|i1", 2**32, 2**32, code=wire_format.ARRAY),
    "empty array of 2^62": array("<f4", 0, 2**31, 2**31, 2**31),
    "array of nothing": array("|V0", 2**31, 2**31),
    # NumPy makes a byte, or four, of each element where it copies them.
    "array of 2^20 empty words": array("<U0", 2**20),
    "text of 2^31 in an array": array("<U536870911", 1, code=wire_format.ARRAY),
    "array of 1,000 dimensions": array("<f4", *[1] * 1000, code=wire_format.ARRAY),
    "long bytes": packb(ExtType(wire_format.BYTES, b"\xff" * 8)),
    "longer bytes": packb(ExtType(wire_format.BYTES, b"\xff" * 1000)),
    "dtype in dtype": array([1, ["a", None, 0, [1, ["a", None, 0, "|i1"]]]] * 9, 1),
    "huge field": array([2**31, ["a", None, 2**31 - 9, "|i1"]], 1),
}


@pytest.mark.parametrize("head", [*BOMBS.values()], ids=BOMBS)
def test_bombs_are_refused_at_once_and_without_memory(head):
    tracemalloc.start()
    try:
        began_s = time.thread_time()
        with pytest.raises(ERRORS):
            decode(head)
        took_s = time.thread_time() - began_s
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert took_s < 0.1  # a few ms of a core, with memory traced
    assert peak < 2 * len(head) + 12_000_000


def test_very_many_empty_lists_are_refused_without_memory():
    head = b"\xdd\x00\x02\x00\x00" + b"\x90" * 2**17
    limits = MessageLimits(leaves=4096)
    tracemalloc.start()
    try:
        with pytest.raises(MessageTooLargeError, match="at most 65536 containers"):
            decode(head, limits=limits)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * len(head)  # all of them take 72 times as much


@pytest.mark.slow
def test_msgpack_in_pure_python_is_refused():
    environment = os.environ | {"MSGPACK_PUREPYTHON": "1"}
    command = [sys.executable, "-c", "import replicator.rpc.codec.codec"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "needs msgpack as it is compiled" in done.stderr


def dictionary_of(keys):
    items = b"".join(encode(key).head + b"\xc0" for key in keys)
    return b"\xdf" + struct.pack(">I", len(keys)) + items


def set_of(keys):
    items = packb(tag(b"s")) + b"".join(encode(key).head for key in keys)
    return b"\xdd" + struct.pack(">I", len(keys) + 1) + items


@pytest.mark.parametrize("make", [dictionary_of, set_of])
def test_a_flood_of_keys_that_share_a_hash_is_refused_at_once(make):
    keys = [n * sys.hash_info.modulus for n in range(20_000)]
    assert len(decode(make(keys[:60]))) == 60
    began_s = time.thread_time()
    with pytest.raises(DecodeError, match=r"At most 64 keys .* may share a hash"):
        decode(make(keys))
    assert time.thread_time() - began_s < 2  # a table of them takes 10 s


@pytest.mark.parametrize("make", [dictionary_of, set_of])
def test_many_keys_of_any_type_are_no_flood(make):
    keys = [*range(3000), *map(float.fromhex, map("0x1.{:04x}p-3".format, range(3000)))]
    keys += [str(n) for n in range(3000)] + [(n, n) for n in range(3000)]
    assert len(decode(make(keys))) == 12_000


def body_of(description, *contents, code=wire_format.SHORT_ARRAY):
    return array(description, len(contents), data=b"".join(contents), code=code)


WRONG = {
    "nothing": b"",
    "unused byte": b"\xc1",
    "two values": b"\xc0\xc0",
    "half a list": b"\x92\xc0",
    "bad text": b"\xa2\xff\xfe",
    "unknown extension": packb(ExtType(99, b"")),
    "list as a key": b"\x81\x90\xc0",
    "array as a key": b"\x81" + array("<f4", 0) + b"\xc0",
    "key twice": b"\x82\x01\xc0\x01\xc0",
    "equal keys": b"\x82\x01\xc0\xc3\xc0",
    "unknown tag": tagged(b"?"),
    "tag of two letters": tagged(b"tt"),
    "empty tag": tagged(b""),
    "tag alone": packb(tag(b"t")),
    "tag in a list": packb([1, tag(b"t")]),
    "tag after a tag": tagged(b"t", tag(b"t")),
    "tag as a key": packb({tag(b"t"): 1}, default=None),
    "tag as a value": packb({"a": tag(b"t")}),
    "element twice": tagged(b"s", 1, 1),
    "equal elements": tagged(b"f", 1, True),
    "element that is a list": tagged(b"s", []),
    "integer of text": tagged(b"i", "1"),
    "integer of two": tagged(b"i", b"1", b"2"),
    "complex of one": tagged(b"c", 1.0),
    "complex of text": tagged(b"c", "1", "2"),
    "parts of `...`": tagged(b".", 1),
    "range of text": tagged(b"r", "a"),
    "range without a step": tagged(b"r", 1, 2, 0),
    "slice of four": tagged(b":", 1, 2, 3, 4),
    "day 0": tagged(b"d", 0),
    "day beyond": tagged(b"d", 2**62),
    "month 13": tagged(b"m", 2026, 13, 1, 0, 0, 0, 0, 0, None, None),
    "pickled time": tagged(
        b"m", b"\x07\xea\x02\x1c\x0c\x00\x01\x00\x00\x05", 0, None, None
    ),
    "long duration": tagged(b"u", 2**40, 0, 0),
    "class not registered": tagged(b"O", "Nobody"),
    "module": tagged(b"O", "os.system", "command", "true"),
    "class without a name": tagged(b"O"),
    "list as a name": tagged(b"O", []),
    "enum as a class": tagged(b"O", "Color"),
    "field missing": tagged(b"O", "Point", "x", 1),
    "field unknown": tagged(b"O", "Point", "x", 1, "z", 1),
    "field twice": tagged(b"O", "Point", "x", 1, "x", 1, "y", 1),
    "field without a value": tagged(b"O", "Point", "x", 1, "y"),
    "field more": tagged(b"O", "Frozen", "a", 1, "b", 1, "__class__", 1),
    "member unknown": tagged(b"E", "Color", "BLUE"),
    "member of a class": tagged(b"E", "Point", "x"),
    "method as a member": tagged(b"E", "Color", "__class__"),
    "list as a member": tagged(b"E", "Color", []),
    "bits of no flags": tagged(b"F", "Color", 1),
    "bits unknown": tagged(b"F", "Access", 64),
    "numpy text of bytes": tagged(b"S", b"a"),
    "key of text": tagged(b"K", "threefry2x32", "a"),
    "key of no implementation": tagged(b"K", "md5", 1),
    "dtype of a number": tagged(b"D", 1),
    "empty header": packb(ExtType(wire_format.ARRAY, b"")),
    "header of a number": packb(ExtType(wire_format.ARRAY, b"\x01\x01")),
    "header of text": packb(ExtType(wire_format.ARRAY, b"\xa3<f4\x04")),
    "negative size": body_of("<f4").replace(b"\x00\x00", b"\x00\xff"),
    "size of truth": array("<f4", True, data=bytes(4)),
    "size of a float": array("<f4", 1.0, data=bytes(4)),
    "order 2": array("<f4", 1, order=2, data=bytes(4)),
    "too few bytes": array("<f4", 2, data=bytes(4)),
    "too many bytes": array("<f4", 1, data=bytes(5)),
    "scalar of rank 1": array("<f4", 1, data=bytes(5), code=wire_format.SCALAR),
    "nested list as a dtype": array([[]], 0),
    "empty dtype": array([], 0),
    "field of no name": array([4, [1, None, 0, "<f4"]], 0),
    "field twice in a dtype": array(
        [8, ["a", None, 0, "<f4"], ["a", None, 4, "<f4"]], 0
    ),
    "field outside": array([4, ["a", None, 2, "<f4"]], 0),
    "field before": array([4, ["a", None, -2, "<f4"]], 0),
    "title that is a name": array([8, ["a", "a", 0, "<f4"], ["b", "a", 4, "<f4"]], 0),
    "truth of 2": body_of("|b1", b"\x01", b"\x02"),
    "one truth of 2": array("|b1", data=b"\x02", code=wire_format.SCALAR),
    "truth of 2 in a field": body_of([1, ["a", None, 0, "|b1"]], b"\x02"),
    "text past Unicode": body_of("<U1", b"\x00\x00\x11\x00"),
    "text past Unicode, swapped": body_of(">U1", b"\x00\x11\x00\x00"),
    "lone mark": LONE,
    "lone array of no bytes": LONE + bytes([wire_format.SHORT_ARRAY]),
    "lone array of too few bytes": lone("<f4", 2, data=bytes(4)),
    "lone array in no body": lone("<f4", 2, code=wire_format.ARRAY),
    "lone scalar": lone("<f4", data=bytes(4), code=wire_format.SCALAR),
    "lone code of none": lone("<f4", 1, data=bytes(4), code=99),
    "lone truth of 2": lone("|b1", 1, data=b"\x02"),
    "lone array in a list": b"\x91" + lone("<f4", 1, data=bytes(4)),
    "lone array, and more": lone("<f4", 1, data=bytes(4)) + b"\xc0",
    "call cut short": CALL + b"\x09" + packb(["act", 1]),
    "bare call of nothing": wire_format.NO_ARGUMENTS,
    "bare call in words": bare_call("act", "soon"),
    "bare call of a truth": bare_call("act", True),
    "bare call of no method": bare_call(1, 60.0),
    "bare call, and more": bare_call("act", 60.0) + b"\xc0",
    "bare call cut short": bare_call("act", 60.0)[:-1],
    "bare call of a long name": bare_call("a" * 300, 60.0),
    "bare call in a list": b"\x91" + bare_call("act", 60.0),
    "call of one, and no array": CALL + b"\x0d" + packb(["act", 60.0]),
    "call of no method": call_of_one(1, 60.0),
    "call by bytes": call_of_one(b"\x92\xc4\x01a\xc0"),
    "call in words": call_of_one("act", "soon"),
    "call of more": call_of_one("act", 60.0, None),
    "call of an extension": call_of_one("act", ExtType(wire_format.TAG, b"t")),
    "call that lies": call_of_one(b"\xdc\xff\xff\xa3act\xc0"),
    "call of noise": call_of_one(b"\xc1\xc1"),
    "text past Unicode in fields": body_of([4, ["a", None, 0, "<U1"]], b"\xff" * 4),
}


@pytest.mark.parametrize("head", [*WRONG.values()], ids=WRONG)
def test_what_is_no_value_of_ours_is_refused(head):
    with pytest.raises(DecodeError):
        decode(head, registry=REGISTRY)


DTYPES = """
    O |O8 object O8 f4 =f4 <f4,<i4 (2,)<f4 <f3 float32 bool int str U S U5 <U <V
    V2147483648 |S99999999999 M8[ns] <M8[zz] <M8[s/2] <M8[-1s] T StringDType() {} []
    bfloat16a >bfloat16 ~ ~<f4 os.system __import__('os') np.dtype
"""


@pytest.mark.parametrize("dtype", [*DTYPES.split(), "", "<f4\n", "<f4 ", "a" * 200])
def test_dtypes_that_are_not_on_the_list_are_refused(dtype):
    with pytest.raises(DecodeError):
        decode(array(dtype, 0))


def test_what_a_constructor_raises_is_a_decode_error():
    class WordlessError(Exception):
        def __str__(self):
            raise ValueError("no words")

    @dataclasses.dataclass
    class Picky:
        x: int

        def __post_init__(self):
            if self.x:
                raise WordlessError
            raise KeyError("x")

    registry = Registry()
    registry.register(Picky)
    for x, text in (
        (0, r"The received bytes are not a valid value: KeyError: 'x'\."),
        (1, "WordlessErr"),
    ):
        with pytest.raises(DecodeError, match=text):
            decode(tagged(b"O", "Picky", "x", x), registry=registry)


def test_a_key_is_refused_where_jax_is_not_imported(monkeypatch):
    head = encode(jax.random.key(0)).head
    monkeypatch.delitem(sys.modules, "jax")
    with pytest.raises(DecodeError, match=r"where JAX is not\. Import jax there first"):
        decode(head)


def test_a_body_that_is_not_the_heads_is_refused():
    head, buffers, _ = encode((np.zeros(1000), bytes(5000)))
    whole = memoryview(bytes(8000) + bytes(5000))
    assert decode(head, whole)[1] == bytes(5000)
    wrong = [buffers[:1], buffers[::-1], [*buffers, memoryview(b"a")]]
    for body in [*map(in_one_piece, wrong), whole[:-1], bytes(13_001), b""]:
        with pytest.raises(DecodeError, match="A body must hold what the head names"):
            decode(head, body)


BARE = NoArgumentCall("stop", None, None, 60.0)


def test_a_body_of_a_bare_call_is_refused():
    head = encode(BARE).head
    with pytest.raises(DecodeError, match="A body must hold what the head names"):
        decode(head, memoryview(b"a"))


@pytest.mark.parametrize("limits", [{"head_bytes": 10}, {"message_bytes": 10}])
def test_a_bare_call_past_a_limit_is_refused_at_the_sender(limits):
    with pytest.raises(MessageTooLargeError):
        encode(BARE, limits=MessageLimits(**limits))


def test_a_bare_call_past_a_limit_is_refused_at_the_receiver():
    with pytest.raises(MessageTooLargeError):
        decode(encode(BARE).head, limits=MessageLimits(head_bytes=10))


def test_a_bare_call_counts_as_deep_as_the_list_that_it_stands_for():
    flat = MessageLimits(depth=0)
    with pytest.raises(MessageTooLargeError, match="containers"):
        decode(encode(BARE).head, limits=flat)
    with pytest.raises(MessageTooLargeError):
        encode(BARE, limits=flat)


def rich():
    head, buffers, _ = encode(RICH, registry=REGISTRY)
    assert not buffers
    return head


def test_every_beginning_of_a_message_is_refused():
    head = rich()
    assert is_same(decode(head, registry=REGISTRY), RICH)
    for length in range(len(head)):
        with pytest.raises(ERRORS):
            decode(head[:length], registry=REGISTRY)


def test_any_bit_may_flip():
    head = rich()
    for bit in range(8 * len(head)):
        flipped = bytearray(head)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            value = decode(bytes(flipped), registry=REGISTRY)
        except ERRORS:
            continue
        again = decode(*encode(value, registry=REGISTRY)[:2], registry=REGISTRY)
        assert is_same(value, again)


@pytest.mark.parametrize("seed", range(3))
def test_any_bytes_may_come(seed):
    rng = random.Random(seed)
    limits = MessageLimits(message_bytes=10_000, head_bytes=4000)
    for _ in range(3000):
        head = rng.randbytes(int(rng.random() ** 4 * 4000))
        try:
            decode(head, rng.randbytes(rng.randrange(100)), limits=limits)
        except ERRORS:
            continue


def test_msgpacks_own_types_pass_or_are_refused():
    assert decode(encode(Timestamp(1, 2)).head) == Timestamp(1, 2)
    with pytest.raises(DecodeError, match="a known one, got code 77"):
        decode(encode([ExtType(77, b"")]).head)


@pytest.mark.parametrize(
    "limit", [{"depth": 1}, {"leaves": 0}, {"rank": 1}, {"message_bytes": 7999}]
)
def test_a_call_of_one_array_is_held_against_each_limit(limit):
    call = ["push", [np.zeros((2, 500))], None, 60.0]
    head, buffers, _ = encode(call)
    limits = MessageLimits(**limit)
    with pytest.raises(MessageTooLargeError):
        decode(head, in_one_piece(buffers), limits=limits)
    with pytest.raises(MessageTooLargeError):
        encode(call, limits=limits)
