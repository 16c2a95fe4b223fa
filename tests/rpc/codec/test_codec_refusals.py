"""What cannot be sent, or is past a limit, is said at the sender, with its place."""

import collections
import dataclasses
import datetime
import enum
import re
import types
import zoneinfo

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicator.errors import EncodeError, MessageTooLargeError
from replicator.rpc.codec.codec import decode, encode
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import Registry
from replicator.rpc.codec.wire_format import in_one_piece


class Opaque:
    def __repr__(self):
        raise RuntimeError("no repr")


class Policy(collections.namedtuple("Policy", "weights bias")):
    pass


@dataclasses.dataclass
class Unknown:
    x: int = 1


class Tensor:
    def __array__(self, dtype=None, copy=None):
        return np.zeros(3)


class Loud(enum.Enum):
    YES = 1


class MyInt(int):
    pass


class MyList(list):
    pass


def function():
    yield


def dtype_of_strings():
    return np.dtypes.StringDType()


HERE = __name__
REGISTER = "which is not registered. Register it with `rpc.register`"
NOT_IT = "must be of a type that can be sent, got"

REFUSED = {
    "object": (
        Opaque(),
        f"a {HERE}.Opaque. Make its class a dataclass and register it with "
        "`rpc.register`, or send its numbers and arrays.",
    ),
    "lambda": (lambda: 1, "a function. Send what it returns."),
    "generator": (function(), "a generator. Send `list` of it."),
    "class": (Opaque, f"the class {HERE}.Opaque. Send its name."),
    "module": (types, "the module types. Send its name."),
    "dataclass": (Unknown(), f"a {HERE}.Unknown, {REGISTER}."),
    "enum": (Loud.YES, f"a {HERE}.Loud, {REGISTER}."),
    "namedtuple": (
        Policy(1, 2),
        f"a {HERE}.Policy, {REGISTER}, or send `tuple` of it.",
    ),
    "exception": (
        ValueError("x"),
        "an exception (ValueError). Raise it, or send its text.",
    ),
    "defaultdict": (
        collections.defaultdict(list),
        "a collections.defaultdict. Send `dict` of it.",
    ),
    "int of its own": (MyInt(3), f"a {HERE}.MyInt. Send `int` of it."),
    "list of its own": (MyList(), f"a {HERE}.MyList. Send `list` of it."),
    "keys": ({}.keys(), "a dict_keys. Send `list` of it."),
    "array of objects": (
        np.array([None]),
        "an array of Python objects (dtype object). Send a list, or an array of "
        "numbers.",
    ),
    "array with objects in it": (
        np.zeros(2, [("a", "O")]),
        "an array of Python objects (dtype [('a', 'O')]). Send a list, or an array of "
        "numbers.",
    ),
    "array of strings": (
        np.array(["a"], dtype_of_strings()),
        "an array of Python objects (dtype StringDType()). Send a list, or an array of "
        "numbers.",
    ),
    "masked array": (
        np.ma.array([1]),
        "a numpy.ma.MaskedArray. Send its data and its mask.",
    ),
    "matrix": (
        np.zeros((2, 2)).view(np.recarray),
        "a numpy.rec.recarray, which is more than an array. Send `np.asarray` of it.",
    ),
    "tensor": (Tensor(), f"a {HERE}.Tensor. Send `np.asarray` of it."),
    "zone": (
        datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        "a time in zone UTC. Send it in UTC.",
    ),
    "strided memory": (
        memoryview(b"abcdef")[::2],
        "a memoryview that cannot be read (BufferError: memoryview: underlying buffer "
        "is not C-contiguous). Send a copy.",
    ),
}


@pytest.mark.parametrize(("value", "what"), [*REFUSED.values()], ids=REFUSED)
def test_what_cannot_be_sent_is_refused_in_full_words(value, what):
    with pytest.raises(EncodeError) as raised:
        encode(value)
    assert str(raised.value) == f"`value` {NOT_IT} {what}"


def registry():
    known = Registry()
    known.register(Policy)
    known.register(Unknown)
    return known


PLACES = {
    "['policy'].weights[2]": {"policy": Policy([1, 2, Opaque()], 0)},
    "[1].x[0][1]": [1, Unknown([(1, Opaque())])],
    "[3]['k'][0]": ("act", [1], None, {"k": (Opaque(),)}),
    "['a'][0]": collections.OrderedDict(a=[Opaque()]),
    "[key (1, <built-in function len>)][1]": {(1, len): 1},
    "[0]{<built-in function len>}": [{len}],
    "[2]": [np.ones(9), b"x" * 9999, Opaque(), Opaque()],
}


@pytest.mark.parametrize("place", PLACES)
def test_the_place_of_what_cannot_be_sent_is_named(place):
    with pytest.raises(EncodeError, match=f"^`value{re.escape(place)}` must be of"):
        encode(PLACES[place], registry=registry())


def test_a_circle_is_found():
    circle = [1]
    circle.append({"a": (circle,)})
    with pytest.raises(EncodeError, match=r"`value\[1\]\['a'\]\[0\]` .*lies in itself"):
        encode(circle)


def test_a_traced_array_is_refused():
    def traced(x):
        encode([x])
        return x

    with pytest.raises(EncodeError, match=r"`value\[0\]` .*traced array. Send it outs"):
        jax.jit(traced)(1.0)


def test_a_deleted_array_is_refused():
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(EncodeError, match=r"`value\['a'\]` .*deleted"):
        encode({"a": array})


def test_a_dictionary_that_grows_meanwhile_is_refused():
    @dataclasses.dataclass
    class Growing:
        x: int

        def __getattribute__(self, name):
            growing.setdefault(len(growing), 1)
            return 1

    growing = {}
    growing[0] = Growing(1)
    grows = Registry()
    grows.register(Growing)
    with pytest.raises(
        EncodeError, match="must stay as it is while it is sent, and di"
    ):
        encode(growing, registry=grows)


SMALL = MessageLimits(message_bytes=10_000, head_bytes=1000, depth=5, leaves=3, rank=2)


def nested(depth, make=lambda inner: [inner]):
    value = None
    for _ in range(depth):
        value = make(value)
    return value


LIMITS = {
    "array": (np.zeros(1240), np.zeros(1251), "message_bytes"),
    "bytes": ([(bytes(9900),)], [(bytes(10_001),)], "message_bytes"),
    "arrays together": ([np.zeros(600)] * 2, [np.zeros(600)] * 3, "message_bytes"),
    "text": ("x" * 990, "x" * 1001, "head_bytes"),
    "numbers": ([0] * 990, [0] * 1000, "head_bytes"),
    "leaves": ([np.zeros(3)] * 3, [np.zeros(3)] * 4, "leaves"),
    "lists": (nested(5), nested(6), "depth"),
    "tuples": (
        nested(5, lambda inner: (1, inner)),
        nested(6, lambda i: (1, i)),
        "depth",
    ),
    "dicts": (nested(5, lambda i: {"a": i}), nested(6, lambda i: {"a": i}), "depth"),
    "dataclasses": (nested(5, Unknown), nested(6, Unknown), "depth"),
    "named tuples": (
        nested(5, lambda i: Policy(i, 0)),
        nested(6, lambda i: Policy(i, 0)),
        "depth",
    ),
    "rank": (np.zeros((1, 1)), np.zeros((1, 1, 1)), "rank"),
    "containers": ([[]] * 47, [[]] * 48, "leaves"),
}
FIT = {name: fit for name, (fit, _, _) in LIMITS.items()}
EXCEED = {name: (large, limit) for name, (_, large, limit) in LIMITS.items()}
ROOMY = MessageLimits(depth=100)


@pytest.mark.parametrize("name", FIT)
def test_what_is_within_the_limits_arrives(name):
    limits = SMALL
    head, buffers, _ = encode(FIT[name], limits=limits, registry=registry())
    decode(head, in_one_piece(buffers), limits=limits, registry=registry())


@pytest.mark.parametrize("name", EXCEED)
def test_what_is_past_a_limit_is_refused_by_the_sender(name):
    value, limit = EXCEED[name]
    with pytest.raises(MessageTooLargeError, match=f"`MessageLimits.{limit}`"):
        encode(value, limits=SMALL, registry=registry())


@pytest.mark.parametrize("name", EXCEED)
def test_what_is_past_a_limit_is_refused_by_the_receiver(name):
    value, limit = EXCEED[name]
    head, buffers, _ = encode(value, limits=ROOMY, registry=registry())
    with pytest.raises(MessageTooLargeError, match=f"`MessageLimits.{limit}`"):
        decode(head, in_one_piece(buffers), limits=SMALL, registry=registry())


def test_the_place_of_what_is_too_deep_is_named():
    with pytest.raises(MessageTooLargeError, match=r"got `value(\[0\]){64}`. Flatten"):
        encode(nested(3000))


def test_an_array_past_the_limit_is_refused_before_it_is_copied():
    huge = np.broadcast_to(np.float32(1), (2**40,))
    with pytest.raises(
        MessageTooLargeError, match=r"at most 1073741824 bytes .*4398046"
    ):
        encode(("push", (huge,), {}, 1.0))
