import concurrent.futures
import threading

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.nodes.cacher_node import MAX_CALLS, Cacher
from tests.rpc.courier_cases import client_of, serving, wait_until


class Target:
    """A client that counts its calls, and answers when it is let."""

    def __init__(self):
        self.calls = []
        self.pending = []
        self.futures = self
        self.later = False

    def call(self, method, args=(), kwargs=None):
        self.calls.append(method)
        if not self.later:
            return f"{method}{len(self.calls)}"
        future = concurrent.futures.Future()
        self.pending.append(future)
        return future


@pytest.fixture
def target():
    return Target()


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def cacher(target, clock):
    return Cacher(target, 1.0, 3.0, now_s=lambda: clock[0])


def test_the_same_call_is_made_once_while_it_is_fresh(cacher, target, clock):
    assert [cacher.answer("get", 1) for _ in range(3)] == ["get1"] * 3
    clock[0] = 3.0
    assert cacher.answer("get", 1) == "get1"


def test_a_target_may_name_its_arguments_as_it_likes(cacher):
    assert cacher.answer("fit", method="lbfgs", self=1) == "fit1"


def test_a_refresh_answers_while_another_caller_still_waits(cacher, target, clock):
    cacher.answer("get")
    clock[0] = 3.01
    known = next(iter(cacher._known.values()))
    with known.lock, concurrent.futures.ThreadPoolExecutor() as pool:
        target.later = True
        cacher.refresh()
        target.pending[0].set_result("news")
        assert pool.submit(cacher.answer, "get").result(60) == "news"


def test_what_is_too_old_is_asked_for_again(cacher, clock):
    assert cacher.answer("get") == "get1"
    clock[0] = 3.01
    assert cacher.answer("get") == "get2"


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 2), (1, True), (1, 1.0), ("a", b"a"), ([1], (1,)), ({"a": 1}, {"b": 1})],
)
def test_unlike_arguments_are_unlike_calls(cacher, target, first, second):
    assert cacher.answer("get", first) != cacher.answer("get", second)
    assert cacher.answer("get", first) == "get1"


def test_named_arguments_in_another_order_are_the_same_call(cacher, target):
    assert cacher.answer("get", a=1, b=2) == cacher.answer("get", b=2, a=1)


def test_a_refresh_replaces_the_answer_while_others_still_get_the_old_one(
    cacher, target, clock
):
    assert cacher.answer("get") == "get1"
    target.later, clock[0] = True, 2.0
    cacher.refresh()
    cacher.refresh()
    assert len(target.pending) == 1
    assert cacher.answer("get") == "get1"
    target.pending[0].set_result("new")
    assert cacher.answer("get") == "new"
    clock[0] = 5.0  # its age counts from when it was asked for
    assert cacher.answer("get") == "new"


def test_a_refresh_that_fails_leaves_the_answer_until_it_is_stale(
    cacher, target, clock
):
    cacher.answer("get")
    target.later = True
    cacher.refresh()
    target.pending[0].set_exception(RuntimeError("gone"))
    assert cacher.answer("get") == "get1"
    target.later, clock[0] = False, 3.5
    assert cacher.answer("get") == "get3"


def test_callers_who_ask_at_once_share_one_call(cacher, target):
    waiting = threading.Barrier(4)

    def ask(_):
        waiting.wait()
        return cacher.answer("get")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(4))) == {"get1"}


def test_there_is_a_limit_to_what_is_remembered(cacher):
    for number in range(MAX_CALLS):
        cacher.answer("get", number)
    with pytest.raises(ArgumentError, match="at most 16 different calls"):
        cacher.answer("get", "one more")
    assert cacher.answer("get", 0) == "get1"


def test_arguments_must_be_plain(cacher):
    with pytest.raises(ArgumentError, match=r"`args` must be at most .* plain values"):
        cacher.answer("get", [np.ones(2)])


def test_an_answer_must_not_be_stale_before_it_is_renewed():
    handle = lp.CourierNode(dict).create_handle()
    with pytest.raises(lp.ProgramError, match="refresh_interval_ms"):
        lp.CacherNode(handle, refresh_interval_ms=2000, stale_after_ms=1000)


def test_a_cacher_refreshes_by_itself():
    class Versions:
        count = 0

        def get(self):
            self.count += 1
            return self.count

    def watch(cacher):
        while cacher.get() < 3:
            lp.wait_for_stop(0.005)
        lp.stop()

    program = lp.Program("p")
    versions = program.add_node(lp.CourierNode(Versions), label="versions")
    cacher = program.add_node(lp.CacherNode(versions, 5, 10_000), label="cacher")
    program.add_node(lp.PyNode(watch, cacher), label="watch")
    lp.launch(program).wait(60)


def test_who_waits_for_another_s_answer_gives_its_place_back_when_its_caller_goes(
    cacher,
):
    class Asking:
        def get(self):
            return cacher.answer("get")

    cacher.answer("get")
    known = next(iter(cacher._known.values()))
    known.entry = known.entry._replace(asked_s=-9.0)
    with known.lock, serving("unix", Asking()) as server:
        client = client_of(server)
        client.futures.get()
        wait_until(lambda: server.statistics().running)
        client.close()
        wait_until(lambda: not server._service.pool.num_running)
