"""Which classes may travel, and under which name."""

import collections
import dataclasses
import enum
import re
from typing import NamedTuple

import pytest

from replicator.errors import ArgumentError, DecodeError, EncodeError
from replicator.rpc.codec.codec import decode, encode
from replicator.rpc.codec.registry import DEFAULT_REGISTRY, Registry, register


class Pair(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass(frozen=True)
class Move:
    action: int
    cost: float = dataclasses.field(default=0.0, init=False)


class Mode(enum.Enum):
    ON = 1


class MissedError(Exception):
    pass


KINDS = {
    "namedtuple": (Pair, ("x", "y")),
    "dataclass": (Move, ("action", "cost")),
    "enum": (Mode, ()),
    "exception": (MissedError, ()),
}


def class_named(name, module="elsewhere"):
    cls = dataclasses.make_dataclass(name, ["x"])
    cls.__module__ = module  # Python 3.12 would set its own over one in `namespace`
    return cls


@pytest.mark.parametrize("kind", KINDS)
def test_classes_are_known_by_their_own_name(kind):
    cls, fields = KINDS[kind]
    registry = Registry()
    assert registry.register(cls) is cls
    entry = registry.entry_of(cls)
    assert entry is registry.entry_named(cls.__name__)
    assert (entry.name, entry.cls, entry.kind) == (cls.__name__, cls, kind)
    assert entry.fields == fields


def test_it_decorates_with_or_without_a_name():
    registry = Registry()

    @registry.register
    class A(enum.Enum):
        X = 1

    @registry.register(name="b.2-b")
    class B(enum.Enum):
        X = 1

    assert registry.entry_named("A").cls is A
    assert registry.entry_named("b.2-b").cls is B
    assert registry.entry_named("B") is None


def test_subclasses_are_not_registered_with_their_bases():
    class Sub(Move):
        pass

    registry = Registry()
    registry.register(Move)
    assert registry.entry_of(Sub) is None
    with pytest.raises(
        EncodeError, match=r"Sub, which is not registered\. Register it"
    ):
        encode(Sub(1), registry=registry)


def test_a_class_may_be_registered_again_and_a_reloaded_one_takes_its_place():
    registry = Registry()
    old, new = class_named("Config"), class_named("Config")
    for cls in (old, old, new):
        registry.register(cls)
    assert registry.entry_named("Config").cls is new


def test_another_class_of_the_same_name_is_refused():
    registry = Registry()
    registry.register(class_named("Config", "first"))
    text = (
        "`name` must be free, got 'Config', which is first.Config. Pass another `name` "
        "for second.Config."
    )
    with pytest.raises(ArgumentError, match=re.escape(text)):
        registry.register(class_named("Config", "second"))


def test_a_second_name_for_a_class_is_refused():
    registry = Registry()
    registry.register(Pair)
    with pytest.raises(ArgumentError, match=r"which is 'Pair'\. Register it once"):
        registry.register(Pair, "Other")


class NeedsMore:
    @dataclasses.dataclass
    class WithInitVar:
        x: int
        seed: dataclasses.InitVar[int]

    @dataclasses.dataclass(init=False)
    class WithOwnInit:
        x: int

        def __init__(self, value):
            self.x = value

    @dataclasses.dataclass(init=False)
    class TakesNothing:
        x: int

        def __init__(self):
            self.x = 1


BAD = {
    "no class": (3, None, "`cls` must be a class, got 3"),
    "plain class": (
        object,
        None,
        "must be a named tuple, dataclass, enum or exception",
    ),
    "tuple": (tuple, None, "must be a named tuple, dataclass, enum or exception"),
    "exit": (SystemExit, None, "must be a named tuple, dataclass, enum or exception"),
    "empty name": (Pair, "", "`name` must be letters, digits"),
    "path": (Pair, "../x", "`name` must be letters, digits"),
    "dotted start": (Pair, ".x", "`name` must be letters, digits"),
    "long name": (Pair, "x" * 129, "`name` must be letters, digits"),
    "unicode": (Pair, "é", "`name` must be letters, digits"),
    "line end": (Pair, "x\n", "`name` must be letters, digits"),
    "no text": (Pair, 5, "`name` must be letters, digits"),
    "init var": (NeedsMore.WithInitVar, None, "also takes 'seed'. Give it a default"),
    "own init": (NeedsMore.WithOwnInit, None, "also takes 'value'. Give it a default"),
    "takes no field": (NeedsMore.TakesNothing, None, "does not take 'x'. Let the data"),
}


@pytest.mark.parametrize(("cls", "name", "text"), [*BAD.values()], ids=BAD)
def test_what_cannot_be_registered_is_refused(cls, name, text):
    with pytest.raises(ArgumentError, match=re.escape(text)):
        Registry().register(cls, name)


def test_registries_do_not_know_each_other():
    ours = Registry()
    ours.register(Pair)
    head = encode(Pair(1, 2), registry=ours).head
    with pytest.raises(DecodeError, match="must be registered to arrive, got 'Pair'"):
        decode(head, registry=Registry())


def test_there_is_one_for_those_who_name_none():
    class Everywhere(collections.namedtuple("Everywhere", "x")):
        pass

    assert register(Everywhere) is Everywhere
    assert DEFAULT_REGISTRY.entry_of(Everywhere) is not None
    assert decode(encode(Everywhere(1)).head) == Everywhere(1)


def test_an_exception_is_no_value():
    registry = Registry()
    registry.register(MissedError)
    with pytest.raises(EncodeError, match=r"an exception .MissedError.\. Raise"):
        encode(MissedError(), registry=registry)
