import copy
import gc
import logging
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from replicator.errors import ArgumentError, BatchError, CallCancelledError
from replicator.rpc.batching import batching as batched_handler_module
from replicator.rpc.batching.batching import BatchedHandler, batched_handler

WAIT_S = 60.0
LONG_S = 1000.0


def at_once(fn, calls):
    """Call from as many threads as there are calls; return results or errors."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(fn, *args) for args in calls]
        return [future.exception(WAIT_S) or future.result() for future in futures]


class Model:
    """Remembers the batches that it saw."""

    def __init__(self, scale=1):
        self.scale = scale
        self.seen = []

    @batched_handler(batch_size=4, timeout_s=LONG_S)
    def predict(self, x, *, name="none"):
        """Scale numbers."""
        self.seen.append(np.asarray(x).tolist())
        return self.scale * x

    @batched_handler(batch_size=3, timeout_s=LONG_S)
    def invert(self, x):
        self.seen.append(x.tolist())
        if 0 in x:
            raise ZeroDivisionError("no zero")
        return 1 / x

    @batched_handler(batch_size=3, timeout_s=LONG_S, isolate_errors=False)
    def invert_together(self, x):
        return Model.invert.__wrapped__(self, x)


def test_concurrent_calls_are_one_call():
    model = Model(scale=10)
    assert at_once(model.predict, [(1,), (2,), (3,), (4,)]) == [10, 20, 30, 40]
    assert [sorted(batch) for batch in model.seen] == [[1, 2, 3, 4]]


def test_named_arguments_are_merged_too():
    found = {}

    @batched_handler(2, timeout_s=LONG_S)
    def describe(x, *, name):
        found.update(x=x, name=name)
        return [f"{n}={value}" for n, value in zip(name, x, strict=True)]

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(describe, np.ones(1), name="a")
        assert describe(np.zeros(1), name="b") == "b=[0.]"
        assert first.result(WAIT_S) == "a=[1.]"
    assert found["x"].shape == (2, 1)
    assert sorted(found["name"]) == ["a", "b"]


def test_upstreams_form_wraps_a_bound_method():
    class Server:
        def __init__(self):
            self.compute = batched_handler(batch_size=2, timeout_s=LONG_S)(self.compute)

        def compute(self, values):
            return values.sum(axis=1)

    assert at_once(Server().compute, [(np.ones(3),), (np.ones(3),)]) == [3, 3]


def test_objects_do_not_share_batches():
    models = Model(scale=1), Model(scale=2)
    calls = [(models[n % 2].predict, n) for n in range(8)]
    results = at_once(lambda method, n: method(n), calls)
    assert results == [0, 2, 2, 6, 4, 10, 6, 14]
    assert [sorted(model.seen[0]) for model in models] == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_do_not_share_batches_with_the_original(make):
    model = Model(scale=3)
    at_once(model.predict, [(n,) for n in range(4)])
    twin = make(model)
    twin = pickle.loads(twin) if isinstance(twin, bytes) else twin
    twin.scale, twin.seen = 5, []
    calls = [(m.predict, 1) for m in (model, twin)] * 4
    assert at_once(lambda method, n: method(n), calls) == [3, 5] * 4


def test_a_method_that_is_overridden_has_batches_of_its_own():
    class Louder(Model):
        @batched_handler(batch_size=1)
        def predict(self, x):
            return 100 + super().predict.__wrapped__(x)

    assert Louder().predict(1) == 101


def test_handler_looks_like_its_function():
    assert isinstance(Model.predict, BatchedHandler)
    assert Model().predict.__name__ == "predict"
    assert Model().predict.__doc__ == "Scale numbers."
    assert Model().predict.batch_size == 4


def test_an_object_with_a_handler_is_freed():
    model = Model()
    at_once(model.predict, [(n,) for n in range(4)])
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_padding_lets_a_jitted_function_compile_once():
    traced = []

    @jax.jit
    def double(x):
        traced.append(x.shape)
        return 2 * x

    handler = batched_handler(4, timeout_s=0, pad_batch=True)(double)
    results = [handler(np.float32(n)) for n in range(3)]
    results += at_once(handler, [(np.float32(n),) for n in range(3)])
    assert results == [0, 2, 4] * 2
    assert traced == [(4,)]


def test_time_over_runs_what_is_there():
    handler = batched_handler(100, timeout_s=0.01)(lambda x: x + 1)
    assert handler(1) == 2


def test_at_most_as_many_run_at_once_as_may():
    gate, running, most = threading.Barrier(2), [], []

    @batched_handler(1, max_parallelism=2)
    def slow(x):
        running.append(x)
        most.append(len(running))
        gate.wait(WAIT_S)
        running.pop()
        return x

    assert sorted(at_once(slow, [(n,) for n in range(6)])) == list(range(6))
    assert max(most) == 2


def test_shapes_that_differ_do_not_fail_each_other():
    handler = batched_handler(2, timeout_s=LONG_S)(lambda x: x.sum(axis=1))
    sizes = [1, 2, 3, 1, 2, 3]
    assert at_once(handler, [(np.ones(size),) for size in sizes]) == sizes


def test_one_bad_request_fails_alone():
    model = Model()
    good, bad, better = at_once(model.invert, [(1,), (0,), (2,)])
    assert (good, better) == (1, 0.5)
    assert isinstance(bad, ZeroDivisionError)
    assert len(model.seen) == 4


def test_without_isolation_all_fail_and_the_function_ran_once():
    model = Model()
    errors = at_once(model.invert_together, [(1,), (0,), (2,)])
    assert [str(error) for error in errors] == ["no zero"] * 3
    assert len(model.seen) == 1


def test_function_that_returns_what_cannot_be_split_ran_once():
    ran = []
    handler = batched_handler(2, timeout_s=LONG_S)(lambda x: ran.append(1) or 7)
    errors = at_once(handler, [(1,), (2,)])
    assert [type(error) for error in errors] == [BatchError] * 2
    assert len(ran) == 1


def test_handler_goes_on_after_errors():
    model = Model()
    at_once(model.invert, [(0,), (0,), (0,)])
    assert at_once(model.invert, [(1,), (2,), (4,)]) == [1, 0.5, 0.25]


def test_interrupt_in_one_thread_is_an_error_in_the_others():
    def stop(x):
        raise KeyboardInterrupt

    handler = batched_handler(3, timeout_s=LONG_S)(stop)
    errors = at_once(handler, [(1,), (2,), (3,)])
    kinds = sorted(type(error).__name__ for error in errors)
    assert kinds == ["CallCancelledError"] * 2 + ["KeyboardInterrupt"]
    (said,) = {str(error) for error in errors if isinstance(error, CallCancelledError)}
    assert said.startswith("KeyboardInterrupt ended `stop`")


def test_argument_without_a_fit_fails_at_its_caller_only():
    loop = ()
    for _ in range(100_000):
        loop = (loop,)
    handler = batched_handler(2, timeout_s=0)(lambda x: x)
    with pytest.raises(RecursionError):
        handler(loop)
    assert handler(1) == 1


def test_many_callers_all_get_their_own():
    handler = batched_handler(7, max_parallelism=2, timeout_s=0.002)(lambda x: [*x])

    def caller(first):
        return [handler(n) == n for n in range(first, first + 200)]

    assert all(map(all, at_once(caller, [(1000 * n,) for n in range(16)])))


def test_a_call_that_waits_long_is_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(batched_handler_module, "_LONGEST_WAIT_S", 0.01)
    said = threading.Event()
    caplog.handler.addFilter(lambda record: said.set() or True)
    handler = batched_handler(2, timeout_s=LONG_S)(lambda x: x)
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as threads:
        first = threads.submit(handler, 1)
        assert said.wait(WAIT_S)
        assert (handler(2), first.result(WAIT_S)) == (2, 1)
    assert "0 batches of it run, 1 wait" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"batch_size": 1, "max_parallelism": 0}, "`max_parallelism` must be at"),
        ({"batch_size": 1, "timeout_s": -1}, "`timeout_s` must be 0 or more"),
        ({"batch_size": 1, "timeout_s": float("nan")}, "`timeout_s` must be 0 or"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        batched_handler(**arguments)


def test_class_with_slots_is_told():
    class Slotted:
        __slots__ = ()

        @batched_handler(2)
        def f(self, x):
            return x

    with pytest.raises(ArgumentError, match="without `__slots__`, got Slotted"):
        Slotted().f(1)
