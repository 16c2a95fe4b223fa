import functools

import pytest

from replicator.errors import ArgumentError
from replicator.rpc.batching.batching import batched_handler
from replicator.rpc.server.methods import (
    QUICK_S,
    Method,
    idempotent,
    method_of_function,
    methods_of,
)


class Base:
    def inherited(self):
        return "inherited"

    def hidden(self):
        return "to be hidden"


class Everything(Base):
    constant = 3
    hidden = None

    class Nested:
        pass

    def __init__(self):
        self.stored = lambda: "not declared"
        self.evaluated = False

    def plain(self):
        return "plain"

    @staticmethod
    def static():
        return "static"

    @classmethod
    def of_class(cls):
        return cls.__name__

    @functools.lru_cache  # noqa: B019
    def cached(self):
        return "cached"

    @property
    def looked_at(self):
        self.evaluated = True
        return lambda: "a property"

    @functools.cached_property
    def looked_at_once(self):
        self.evaluated = True
        return lambda: "a property"

    @idempotent
    def read(self):
        return "read"

    def __call__(self):
        return "called"

    def _private(self):
        return "private"

    def __len__(self):
        return 1


def test_the_declared_public_methods_are_offered_and_nothing_else():
    declared = {
        "__call__",
        "cached",
        "inherited",
        "of_class",
        "plain",
        "read",
        "static",
    }
    assert set(methods_of(Everything())) == declared


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("plain", "plain"),
        ("static", "static"),
        ("of_class", "Everything"),
        ("cached", "cached"),
        ("inherited", "inherited"),
        ("__call__", "called"),
    ],
)
def test_each_kind_of_method_is_bound(name, result):
    assert methods_of(Everything())[name].function() == result


def test_no_property_is_evaluated():
    instance = Everything()
    methods_of(instance)
    assert not instance.evaluated


def test_what_the_constructor_put_in_place_of_a_method_is_called():
    class Doubler:
        def __init__(self):
            self.double = batched_handler(4)(self.double)

        def double(self, x):
            return 2 * x

    assert methods_of(Doubler())["double"].batch_size == 4


@pytest.mark.parametrize("wrap", [staticmethod, classmethod, functools.cache, None])
def test_the_mark_of_idempotent_methods_is_found_through_wrappers(wrap):
    def read(*_):
        return 1

    for made in (
        [idempotent(read)]
        if wrap is None
        else [wrap(idempotent(read)), idempotent(wrap(read))]
    ):
        cls = type("Store", (), {"read": made})
        assert methods_of(cls())["read"].is_idempotent


def test_methods_are_not_idempotent_unless_marked():
    methods = methods_of(Everything())
    assert {name for name in methods if methods[name].is_idempotent} == {"read"}


@pytest.mark.parametrize("instance", [Everything, object(), 3, []])
def test_what_declares_no_method_is_refused(instance):
    with pytest.raises(ArgumentError, match="instance"):
        methods_of(instance)


@pytest.mark.parametrize(
    "name", ["", "_hidden", "a.b", "~hello", "__init__", "two words"]
)
def test_a_function_needs_a_public_name(name):
    with pytest.raises(ArgumentError, match="name"):
        method_of_function(name, print)


class Async:
    async def answer(self):
        return 1

    __call__ = answer


async def generate():
    yield 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: methods_of(Async()),
        lambda: method_of_function("answer", Async().answer),
        lambda: method_of_function("answer", functools.partial(Async().answer)),
        lambda: method_of_function("answer", generate),
        lambda: method_of_function("answer", Async()),
        lambda: batched_handler(2)(Async().answer),
    ],
)
def test_what_would_have_to_be_awaited_is_refused(make):
    with pytest.raises(ArgumentError, match="must be a plain function, got `async def"):
        make()


def test_what_cannot_be_called_is_no_function():
    with pytest.raises(ArgumentError, match="callable"):
        method_of_function("three", 3)


@pytest.mark.parametrize("builtin", [dict, len, "text"])
def test_what_bears_no_mark_cannot_be_idempotent(builtin):
    with pytest.raises(ArgumentError, match="function"):
        idempotent(builtin)


def test_a_method_counts_as_quick_only_after_some_calls():
    method = Method("m", print)
    were_quick = []
    for _ in range(6):
        were_quick.append(method.is_quick)
        method.took(QUICK_S / 10)
    assert were_quick == [False] * 4 + [True] * 2


def test_one_slow_call_does_not_make_a_method_slow_and_many_do():
    method = Method("m", print)
    for _ in range(4):
        method.took(0.0)
    method.took(100.0)
    assert method.is_quick
    for _ in range(5):
        method.took(2 * QUICK_S)
    assert not method.is_quick


def test_a_slow_method_that_became_quick_is_found_quick_again():
    method = Method("m", print)
    for seconds in [1.0] * 100 + [0.0] * 6:
        method.took(seconds)
    assert method.is_quick


def test_a_call_that_held_others_up_makes_its_method_slow_for_a_while():
    method = Method("m", print)
    for _ in range(4):
        method.took(0.0)
    method.held_up()
    assert not method.is_quick
    for _ in range(64):
        method.took(0.0)
    assert method.is_quick


def test_a_batched_method_never_counts_as_quick():
    method = Method("m", batched_handler(2)(lambda x: x))
    for _ in range(100):
        method.took(0.0)
    assert not method.is_quick
