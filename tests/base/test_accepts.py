"""What arrives is held against one description, at no cost whatever it is."""

import threading
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicator.base.accepts import (
    accepted_by,
    accepts,
    array,
    blob,
    is_array,
    is_number,
    items,
    plain,
    seconds,
    shown,
    text,
    texts,
    whole,
)
from replicator.errors import ArgumentError

HUGE = range(20_000_000)
RULES = {
    "text": (text(3), ["abc", ""], ["abcd", b"abc", 3, None, HUGE]),
    "blob": (blob(3), [b"abc", b""], [b"abcd", "abc", bytearray(2), HUGE]),
    "whole": (
        whole(0, 9),
        [0, 9, np.int8(3), np.uint64(9)],
        [-1, 10, True, 1.0, np.float32(1), 10**5000, "1", None, HUGE],
    ),
    "seconds": (
        seconds(),
        [0, 1.5, np.float32(2), threading.TIMEOUT_MAX],
        [-1, float("nan"), float("inf"), 10**400, 1j, "1", HUGE],
    ),
    "numbers": (
        items("numbers", is_number, 2),
        [[], (1.0, np.float32(2)), [float("nan")], [True]],
        [[1, 2, 3], HUGE, [HUGE], ["1"], [1j], [10**400], 3, np.ones(2), {1: 2}],
    ),
    "texts": (texts(2), [[], ("a",)], ["ab", [3], ["x" * 257], ["a"] * 3, {"a": 1}]),
    "array": (
        array("b", 2),
        [np.ones(2, bool), jnp.ones(1, bool)],
        [np.ones(3, bool), np.ones((1, 1), bool), np.ones(2), [True], np.True_, HUGE],
    ),
    "plain": (
        plain(4, most_text=8),
        [None, 1.5, [1, "a", b"b"], {"a": (1,)}, "12345678", []],
        [
            [1] * 5,
            {"a": {"b": 1, "c": 2}, "d": 3, "e": 4},
            "123456789",
            HUGE,
            np.ones(2),
            1 << 99,
        ],
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_what_is_right_passes(name):
    rule, right, _ = RULES[name]
    assert [value for value in right if not rule.is_right(value)] == []


@pytest.mark.parametrize("name", RULES)
def test_what_is_wrong_is_found_in_no_time_and_memory(name):
    rule, _, wrong = RULES[name]
    tracemalloc.start()
    began_s = time.thread_time()
    assert [value for value in wrong if rule.is_right(value)] == []
    assert time.thread_time() - began_s < 5.0  # a collection of garbage may take one
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_an_empty_axis_makes_no_array_small():
    assert is_array(np.zeros((3, 0)))
    assert is_array(jax.random.key(0))
    assert not is_array(np.zeros((1 << 30, 0)))
    assert not is_array(np.zeros((2, 10**12, 0), bool))


@pytest.mark.parametrize("kind", ["S0", "U0", "V0"])
def test_elements_without_bytes_make_no_array_small(kind):
    # NumPy makes one byte, or four, of each where it copies them.
    assert not is_array(np.ndarray(1 << 31, np.dtype(kind), buffer=b""))


@pytest.mark.parametrize("value", [b"x" * (1 << 22), np.str_("x" * (1 << 22))])
def test_long_text_is_told_by_its_length_and_not_written_out(value):
    tracemalloc.start()
    told = shown(value)
    assert tracemalloc.get_traced_memory()[1] < 1 << 16
    tracemalloc.stop()
    assert told == f"{type(value).__name__} of {1 << 22}"


class Service:
    @accepts(ValueError, "who", word=text(3), who=text(8), number=whole(0, 9))
    def say(self, word, *, who, number=None):
        return word, who, number

    @accepts(name=text(), args=plain(4, most_text=8), kwargs=plain(4, most_text=8))
    def pass_on(self, name, *args, **kwargs):
        return name, args, kwargs


REFUSED = [
    (("long",), {"who": "me"}, "`word` of me must be a string of at most 3 .* 'long'"),
    (("a",), {"who": "x" * 9}, "`who` must be a string of at most 8"),
    ((HUGE,), {"who": HUGE}, "`who` must be .* got range"),
    (("a",), {"who": "me", "number": 10**5000}, "`number` of me must be .* got int"),
]


@pytest.mark.parametrize(("args", "kwargs", "told"), REFUSED)
def test_the_argument_its_rule_and_who_calls_are_named(args, kwargs, told):
    with pytest.raises(ValueError, match=told):
        Service().say(*args, **kwargs)


def test_good_arguments_and_defaults_pass():
    assert Service().say("a", who="me") == ("a", "me", None)
    assert Service().say("a", who="me", number=3) == ("a", "me", 3)
    assert Service().pass_on("a", 1, b=2) == ("a", (1,), {"b": 2})
    assert [*accepted_by(Service.say)] == ["word", "who", "number"]


@pytest.mark.parametrize("more", [{"args": [1] * 5}, {"kwargs": {"b": HUGE}}])
def test_what_a_method_passes_on_is_bounded(more):
    with pytest.raises(ArgumentError, match=f"`{next(iter(more))}` must be"):
        Service().pass_on("a", *more.get("args", ()), **more.get("kwargs", {}))


def test_what_no_parameter_takes_is_refused_by_python():
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        Service().say("a", who="me", other=HUGE)
    with pytest.raises(TypeError, match="missing a required"):
        Service().say("a")


def test_a_parameter_without_a_rule_is_an_error():
    with pytest.raises(ArgumentError, match="`rules` must be of word, got  for"):

        @accepts()
        def say(self, word):
            pass
