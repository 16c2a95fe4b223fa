"""A value that many ask for is encoded once, and arrives as any other does."""

import contextlib
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from replicator import rpc
from replicator.errors import EncodeError, MessageTooLargeError, RemoteError
from replicator.rpc.codec.codec import encode
from replicator.rpc.codec.registry import Registry
from tests.rpc.courier_cases import LONG_S, NAMES, client_of, courier, serving

ENCODED = [name for name in NAMES if name != "in-process"]
VALUES = {
    "nothing": None,
    "a number": 3,
    "a short array": np.arange(3),
    "a long array": np.arange(200_000),
    "a tree": {"a": [np.ones(3), {"b": np.zeros((70, 1000), np.int8)}], "c": (1, "x")},
    "long bytes": b"ab" * 100_000,
    "fortran order": np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
}


class Shelf:
    """Returns the same object to all."""

    def __init__(self, kept):
        self.kept = kept

    def pull(self):
        return self.kept

    @rpc.idempotent
    def pull_once(self):
        return self.kept

    def pull_within(self):
        return {"a": [self.kept]}


@rpc.register(name="tests-counted")
@dataclasses.dataclass
class Counted:
    """Counts how often it is looked into."""

    array: np.ndarray

    def __getattribute__(self, name):
        if name == "array":
            looks.append(threading.get_ident())
        return super().__getattribute__(name)


looks = []


@pytest.mark.parametrize("transport", NAMES)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_it_arrives_as_its_value_does(transport, value):
    with courier(transport, Shelf(rpc.EncodedOnce(value))) as (client, _):
        for _ in range(3):
            np.testing.assert_equal(client.pull(), value)
        np.testing.assert_equal(client.pull_once(), value)


@pytest.mark.parametrize("transport", ENCODED)
def test_callers_at_once_have_it_encoded_once(transport):
    looks.clear()
    kept = rpc.EncodedOnce(Counted(np.arange(100_000)))
    start = threading.Barrier(4)

    def pull(client):
        start.wait(LONG_S)
        return client.pull()

    with serving(transport, Shelf(kept)) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(client_of(server)) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(pull, clients))
        assert len(looks) == 1
    for each in found:
        np.testing.assert_array_equal(each.array, np.arange(100_000))


def test_in_process_it_arrives_by_reference():
    value = {"a": np.ones(100_000)}
    with courier("in-process", Shelf(rpc.EncodedOnce(value))) as (client, _):
        assert client.pull() is value


@pytest.mark.parametrize("transport", ENCODED)
def test_within_another_value_it_is_refused_by_name(transport):
    with (
        courier(transport, Shelf(rpc.EncodedOnce(1))) as (client, _),
        pytest.raises(EncodeError, match=r"value\['a'\]\[0\].*Return it alone"),
    ):
        client.pull_within()


@pytest.mark.parametrize("transport", ENCODED)
def test_what_cannot_be_sent_is_said_to_each_caller(transport):
    with courier(transport, Shelf(rpc.EncodedOnce({"a": object()}))) as (client, _):
        for _ in range(2):
            with pytest.raises(RemoteError, match=r"`pull` returned.*value\['a'\]"):
                client.pull()


def test_each_registry_and_each_limit_has_an_encoding_of_its_own():
    kept = rpc.EncodedOnce(Counted(np.arange(9)))
    assert encode(kept) is encode(kept)
    with pytest.raises(EncodeError, match="not registered"):
        encode(kept, registry=Registry())
    with pytest.raises(MessageTooLargeError):
        encode(kept, limits=rpc.MessageLimits(message_bytes=20))
    assert encode(kept) is encode(kept)
