"""Functions of the host as ops: in order, once, beside the devices."""

import gc
import os
import pickle
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from replicator import controller
from replicator.controller.islands.running.host_ops import call_on_host
from replicator.controller.islands.running.host_run import HostFunction
from replicator.errors import ArgumentError, OpFailedError

ONES = np.ones(2, np.float32)
PAIR = jax.ShapeDtypeStruct((2,), np.float32)
NUMBER = jax.ShapeDtypeStruct((), np.int32)
KEY = jax.eval_shape(jax.random.key, 0)
HALF = jax.ShapeDtypeStruct((), np.float64)
LIMIT_S = 60


class Counter:
    """Adds how often it was called."""

    def __init__(self):
        self.calls = 0

    def add(self, x):
        self.calls += 1
        return {"x": x + self.calls, "calls": np.int32(self.calls)}

    def process(self, x):
        del x
        self.calls += 1
        return np.array([self.calls, os.getpid()], np.int32)


@pytest.fixture(scope="module")
def pw():
    with controller.local(islands=2, devices=2) as opened:
        yield opened


def added(pw, on):
    counter = Counter()
    return counter, pw.host(counter.add, on, {"x": PAIR, "calls": NUMBER})


MADE = []


def made():
    MADE.append(object())
    return np.sin


class Made:
    """A function that counts how often it is made of its pickle."""

    def __call__(self, x):
        return np.sin(x)

    def __reduce__(self):
        return made, ()


def test_a_function_that_arrives_twice_at_once_is_one_object():
    data, at_once = pickle.dumps(HostFunction(Made())), threading.Barrier(8)

    def arrive(_):
        at_once.wait(LIMIT_S)
        return pickle.loads(data)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(arrive, range(8)))) == len(MADE) == 1


def test_calls_are_made_once_in_order_and_also_if_nobody_reads_them(pw):
    on, other = pw.slice(2, island="island0"), pw.slice(2, island="island1")
    counter, add = added(pw, on)
    double, minus = pw.fn(lambda x: x * 2, on), pw.fn(lambda x: x - 1, other)

    @pw.program
    def flow(x):
        first = add(double(x) + 1)
        add(x)
        last = add(double(first["x"]))
        return minus(last["x"]), first["calls"], last["calls"]

    x, *calls = controller.read(flow(ONES))
    assert (x.tolist(), list(map(int, calls))) == ([10.0, 10.0], [1, 3])
    assert controller.read(add(ONES))["calls"] == counter.calls == 4


def test_devices_of_its_slice_go_on_beside_it(pw):
    on, go = pw.slice(2), threading.Event()
    wait = pw.host(lambda x: x * go.wait(LIMIT_S), on, PAIR)
    waiting = wait(ONES)
    assert pw.fn(lambda x: x + 1, on)(ONES).result(LIMIT_S).tolist() == [2.0, 2.0]
    assert not waiting.done()
    go.set()
    assert waiting.result(LIMIT_S).tolist() == [1.0, 1.0]


def test_calls_without_results_wait_while_too_many_are_not_done(pw):
    with pw.client("recorder") as client:
        go, room = threading.Event(), client._record.room
        record = client.host(lambda x: x * go.wait(LIMIT_S), client.slice(2), PAIR)
        flow = client.program(lambda x: (record(x), None)[1])
        for _ in range(64):
            assert flow(ONES) is None
        assert room.empty()
        go.set()
        assert [room.get(timeout=LIMIT_S) for _ in range(64)] == [None] * 64


def test_it_gets_what_was_there_though_its_memory_is_taken(pw):
    on, go = pw.slice(2), threading.Event()
    wait = pw.host(lambda x: x * go.wait(LIMIT_S), on, PAIR)
    value = pw.put(ONES, on)
    seen = wait(value)
    taken = pw.fn(lambda x: x + 5, on, donate=0)(value)
    assert taken.result(LIMIT_S).tolist() == [6.0, 6.0]
    go.set()
    assert seen.result(LIMIT_S).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("error", [ValueError, AttributeError, SystemExit])
def test_what_it_raises_reaches_what_takes_its_results(pw, error):
    def broken(x):
        raise error("no such luck")

    on = pw.slice(2)
    fail = pw.host(broken, on, PAIR)
    for future in (fail(ONES), pw.fn(lambda x: x * 2, on)(fail(ONES))):
        with pytest.raises(OpFailedError, match=r"broken.*no such luck"):
            future.result(LIMIT_S)


@pytest.mark.parametrize("result", [None, np.float32, np.dtype("f4"), KEY])
def test_a_result_that_is_no_shape_is_refused(pw, result):
    with pytest.raises(ArgumentError, match="`result` must be a tree of shapes"):
        pw.host(np.sum, pw.slice(2), result)


def test_an_operation_goes_with_the_first_that_needs_it(pw):
    on = pw.slice(2)
    double, (_, add) = pw.fn(lambda x: x * 2, on), added(pw, on)

    @pw.program
    def flow(x):
        shared = double(x) + 1
        later = shared * 2
        return add(shared)["x"], double(shared), double(later)

    found = controller.read(flow(ONES))
    assert [x.tolist() for x in found] == [[4.0, 4.0], [6.0, 6.0], [12.0, 12.0]]


def test_another_result_than_it_said_is_named(pw):
    short = pw.host(lambda x: x[:1], pw.slice(2), PAIR)
    with pytest.raises(OpFailedError, match=r"`result` of `pw.host` says.*\(1,\)"):
        short(ONES).result(LIMIT_S)


def test_numbers_of_python_are_those_that_jax_makes_of_them(pw):
    size = pw.host(lambda x: (x.size, 0.5), pw.slice(2), (NUMBER, HALF))
    assert [x.dtype for x in size(ONES)] == [np.int32, np.float32]
    assert list(map(float, controller.read(size(ONES)))) == [2.0, 0.5]


def test_it_is_neither_differentiated_nor_mapped(pw):
    _, add = added(pw, pw.slice(2))
    with pytest.raises(ArgumentError, match="must not be differentiated"):
        pw.program(jax.grad(lambda x: add(x)["x"].sum()))(ONES)
    with pytest.raises(ArgumentError, match="must not be mapped"):
        pw.program(jax.vmap(lambda x: add(x)["x"]))(np.ones((3, 2), np.float32))


def test_a_result_that_is_kept_keeps_no_other():
    at_once = types.SimpleNamespace(put=lambda call: call())
    large, small = np.zeros(2), np.zeros(1)
    kept = weakref.ref(large)
    made = [large, small]
    results = call_on_host(at_once, lambda: made, [], [], tuple, 2)
    del large, made, results[:2]
    assert kept() is None
    assert results[0].array() is small


@pytest.mark.slow
def test_all_calls_on_an_island_that_is_a_process_are_of_one_object_there():
    with controller.start(islands=1, devices=1, lost_after_s=300) as pw:
        counter, on = Counter(), pw.slice(1)
        result = jax.ShapeDtypeStruct((2,), np.int32)
        process = pw.host(counter.process, on, result)
        twice = pw.program(lambda x: (process(x), process(x)))
        found = [*controller.read(twice(ONES)), controller.read(process(ONES))]
        assert probed(pw, on) == 1
        del process, twice
        gc.collect()
        assert probed(pw, on) == 0  # it lived there as long as its op did here
    calls, ids = np.array(found).T.tolist()
    assert calls == [1, 2, 3]
    assert os.getpid() not in ids
    assert counter.calls == 0


def counters(x):
    gc.collect()
    found = [each for each in gc.get_objects() if type(each).__name__ == "Counter"]
    return np.int32(sum("process" in vars(type(each)) for each in found)) + 0 * x


def probed(pw, on):
    return int(pw.host(counters, on, NUMBER)(np.int32(0)))
