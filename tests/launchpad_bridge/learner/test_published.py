"""Published variables: the newest ones, whole, encoded once, waited for in bounds."""

import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from replicator import rpc
from replicator.errors import ArgumentError, CallTimeoutError, ReplicatorError
from replicator.launchpad_bridge.learner.published import (
    PublishedVariables,
    Variables,
    VariablesError,
    VariablesTimeoutError,
)
from tests.rpc.courier_cases import LONG_S, NAMES, client_of, courier, serving
from tests.rpc.test_encoded_once import Counted, looks

SHORT_S = 0.2


def values_of(version, size=20_000):
    return {
        "policy": {"w": np.full(size, version, np.float32), "b": np.zeros(2)},
        "steps": np.full(size, version),
    }


def published_of(*versions, keep=1):
    published = PublishedVariables(keep=keep)
    for version in versions:
        published.publish(version, values_of(version))
    return published


def version_of(found):
    return None if found is None else found.version


# What is there.


def test_the_newest_version_is_returned_with_all_its_values():
    found = published_of(3, 4).get(timeout_s=0)
    assert isinstance(found, Variables)
    assert found.version == 4
    np.testing.assert_equal(found.values, values_of(4))


def test_names_choose_among_the_values():
    assert [*published_of(1).get(["steps"], timeout_s=0).values] == ["steps"]
    assert published_of(1).get([], timeout_s=0).values == {}


def test_who_has_the_newest_version_is_given_none():
    published = published_of(5)
    assert published.get(newer_than=5) is None
    assert published.get(newer_than=4).version == 5
    assert published.get(newer_than=9).version == 5, (
        "of before a return to a checkpoint"
    )


def test_as_many_versions_are_kept_as_are_to_be():
    published = published_of(1, 2, 3, 4, keep=3)
    assert [published.get(version=v).version for v in (2, 3, 4)] == [2, 3, 4]
    with pytest.raises(VariablesError, match=r"kept are 2, 3, 4\. Give .*`fixed_lag`"):
        published.get(version=1)


def test_a_learner_that_went_back_takes_back_what_came_later():
    published = published_of(8, 9, 10, keep=3)
    published.publish(9, values_of(-9))
    assert published.version == 9
    assert published.get(version=9).values["steps"][0] == -9
    assert published.get(version=8).version == 8
    assert published.get(version=10, timeout_s=0) is None, "it is still to come"


def test_nothing_is_copied_and_nobody_in_this_process_can_write():
    values = values_of(1)
    published = PublishedVariables()
    published.publish(1, values)
    found = published.get().values["policy"]["w"]
    assert np.shares_memory(found, values["policy"]["w"])
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1
    values["policy"]["w"][0] = 7  # its owner's memory is as it was


def test_a_version_goes_with_all_that_was_made_of_it():
    published = published_of(1)
    with serving("unix", published) as server, client_of(server) as client:
        client.get()
        client.get(["steps"])
        (version,) = published._kept.values()
        replies = [weakref.ref(reply) for reply in version.replies.values()]
        assert len(replies) == 2
        del version
        published.publish(2, values_of(2))
        assert client.get().version == 2  # the server has let go of its last reply
        assert [reply() for reply in replies] == [None, None]


# What is refused.


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(VariablesError, match=r"'polcy'; published are 'policy', 'st"):
        published_of(1).get(["policy", "polcy"], timeout_s=0)


@pytest.mark.parametrize(
    "names", ["policy", 3, [["policy"]], {"policy": 1}, [3], range(10**9), ["x" * 300]]
)
def test_what_is_no_list_of_names_is_refused(names):
    with pytest.raises(ArgumentError, match="`names` must be a list of at most"):
        published_of(1).get(names, timeout_s=0)


def test_of_many_sets_of_names_a_few_are_kept():
    published = PublishedVariables()
    published.publish(1, {f"{name}": np.ones(2) for name in range(40)})
    with serving("unix", published) as server, client_of(server) as client:
        for name in range(40):
            assert [*client.get([f"{name}"]).values] == [f"{name}"]
        (version,) = published._kept.values()
        assert len(version.replies) == 16
        client.get()  # of all, as actors ask by default: that is made once
        assert len(version.replies) == 17


@pytest.mark.parametrize(
    ("publish", "reason"),
    [
        (lambda p: p.publish(1.5, {}), "`version` must be"),
        (lambda p: p.publish(1, [np.ones(2)]), "`values` must be pytrees by name"),
        (lambda p: PublishedVariables(keep=0), "`keep` must be at least 1"),
        (lambda p: p.get(version=1, newer_than=1), "`newer_than` must not"),
    ],
)
def test_wrong_arguments_are_refused(publish, reason):
    with pytest.raises(ArgumentError, match=reason):
        publish(PublishedVariables())


# Waiting.


@pytest.mark.parametrize("asked", [None, 7])
def test_what_is_still_to_come_is_waited_for(asked):
    published = PublishedVariables() if asked is None else published_of(6)
    with ThreadPoolExecutor(3) as pool:
        found = [
            pool.submit(published.get, version=asked, timeout_s=LONG_S)
            for _ in range(3)
        ]
        published.publish(7, values_of(7))
        assert [each.result(LONG_S).version for each in found] == [7] * 3


@pytest.mark.parametrize("asked", [None, 7])
def test_what_does_not_come_in_time_is_none(asked):
    published = PublishedVariables() if asked is None else published_of(6)
    assert published.get(version=asked, timeout_s=0.01) is None


def test_a_call_is_told_before_its_deadline_what_it_waited_for():
    with courier("unix", published_of(6)) as (client, _):
        for timeout_s in (SHORT_S, 2.0, 20.0):  # a busy machine may answer too late
            with pytest.raises(TimeoutError) as late:
                client.call("get", kwargs={"version": 7}, timeout_s=timeout_s)
            if isinstance(late.value, VariablesTimeoutError):
                break
        assert re.search(r"version 7 .* newest is 6", str(late.value))
        assert client.get(version=7, timeout_s=0.01) is None


class Waited(PublishedVariables):
    """Tells when a wait has ended, and with what."""

    def __init__(self):
        super().__init__()
        self.ended = threading.Event()
        self.returned = []

    def get(self, *args, **kwargs):
        try:
            self.returned.append(super().get(*args, **kwargs))
        finally:
            self.ended.set()
        return self.returned[-1]


@pytest.mark.parametrize("end", ["caller", "server"])
def test_a_wait_ends_when_the_caller_goes_or_the_server_stops(end):
    waited = Waited()
    with serving("unix", waited) as server:
        client = client_of(server)
        future = client.futures.get(version=1)
        while not waited._changed._waiters:
            assert not future.done()
        if end == "caller":
            client.close()
        else:
            server.stop(drain_s=0)
        assert waited.ended.wait(LONG_S)
        assert waited.returned == [None]
        client.close()


# Over RPC.


@pytest.mark.parametrize("transport", NAMES)
def test_callers_receive_variables(transport):
    with courier(transport, published_of(3, 4, keep=2)) as (client, _):
        np.testing.assert_equal(client.get().values, values_of(4))
        np.testing.assert_equal(client.get(version=3).values, values_of(3))
        found = client.get(["steps"], newer_than=3)
        assert (found.version, [*found.values]) == (4, ["steps"])
        assert client.get(newer_than=4) is None


@pytest.mark.parametrize("transport", ["unix", "grpc"])
def test_callers_of_a_new_version_at_once_have_it_encoded_once(transport):
    looks.clear()
    published = PublishedVariables()
    with serving(transport, published) as server, ThreadPoolExecutor(4) as pool:
        clients = [client_of(server) for _ in range(4)]
        found = [pool.submit(client.get) for client in clients]
        published.publish(1, {"policy": Counted(np.arange(100_000))})
        received = [each.result(LONG_S) for each in found]
        for client in clients:
            client.get(["policy"])  # all names, said in another way
            client.close()
        assert len(looks) == 1
    for each in received:
        array = each.values["policy"].array
        np.testing.assert_array_equal(array, np.arange(100_000))


class Held:
    """Says that it is being encoded, which takes until the test lets go."""

    def __init__(self):
        self.is_encoding = threading.Event()
        self.go_on = threading.Event()


def test_publishing_does_not_wait_for_who_encodes():
    held_up = Held()

    def encoded():
        held_up.is_encoding.set()
        assert held_up.go_on.wait(LONG_S)

    published = published_of(1)
    with serving("unix", published) as server, client_of(server) as client:
        (version,) = published._kept.values()
        reply = rpc.EncodedOnce(version.values)
        version.replies["policy", "steps"] = reply
        with ThreadPoolExecutor(2) as pool:
            held = pool.submit(reply.kept, "as a codec does", encoded)
            assert held_up.is_encoding.wait(LONG_S)
            late = client.futures.get()
            published.publish(2, values_of(2))
            assert client.futures.get().result(LONG_S).version == 2
            held_up.go_on.set()
            held.result(LONG_S)
        late.result(LONG_S)


def test_versions_are_whole_however_many_publish_and_pull():
    published = published_of(0)
    with serving("unix", published) as server, ThreadPoolExecutor(4) as pool:
        clients = [client_of(server) for _ in range(3)]

        def pull(client):
            seen = []
            while not seen or seen[-1] < 60:
                found = client.get(newer_than=seen[-1] if seen else None)
                if found is not None:
                    np.testing.assert_equal(found.values, values_of(found.version))
                    seen.append(found.version)
            return seen

        pulled = [pool.submit(pull, client) for client in clients]
        for version in range(1, 61):
            published.publish(version, values_of(version))
        for each in pulled:
            seen = each.result(LONG_S)
            assert seen == sorted(set(seen))
        for client in clients:
            client.close()


def test_errors_arrive_as_what_they_are():
    with courier("unix", published_of(5)) as (client, _):
        with pytest.raises(VariablesError):
            client.get(version=4)
        with pytest.raises(VariablesError):
            client.get(["nothing"])
    assert issubclass(VariablesError, ReplicatorError)
    assert not issubclass(VariablesTimeoutError, CallTimeoutError)
