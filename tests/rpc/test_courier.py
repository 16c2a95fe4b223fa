"""One suite for all transports: same calls, same answers, same failures."""

import concurrent.futures
import threading
import time
import weakref

import numpy as np
import pytest

from replicator.errors import (
    CallCancelledError,
    CallTimeoutError,
    EncodeError,
    RemoteError,
)
from replicator.rpc.client.client import list_methods, statistics
from tests.rpc.courier_cases import (
    LONG_S,
    NAMES,
    Probe,
    client_of,
    courier,
    serving,
    wait_until,
)

ENCODED = [name for name in NAMES if name != "in-process"]


@pytest.fixture(params=NAMES)
def transport(request):
    return request.param


def test_a_method_returns_what_it_returns(transport):
    value = {"a": [1, 2.5, "text", None, b"bytes"], "b": (True, {"c": -1})}
    with courier(transport) as (client, _):
        assert client.echo(value) == value
        assert client.echo(x=1, y=[2]) == {"x": 1, "y": [2]}
        assert client.noop() is None


def test_arrays_travel_both_ways(transport):
    arrays = {"small": np.arange(3), "large": np.random.default_rng(0).random(300_000)}
    with courier(transport) as (client, _):
        back = client.echo(arrays)
        assert all(np.array_equal(back[name], arrays[name]) for name in arrays)
        assert all(back[name].dtype == arrays[name].dtype for name in arrays)


class Watcher:
    """Remembers the arrays that it is given, but does not keep them."""

    def __init__(self):
        self.given = []

    def push(self, *args, **kwargs):
        self.given += map(weakref.ref, [*args, *kwargs.values()])

    def num_alive(self):
        return sum(array() is not None for array in self.given)


@pytest.mark.parametrize("transport", ENCODED, indirect=True)
def test_a_server_lets_go_of_arrays_before_it_replies(transport, monkeypatch):
    array = np.zeros(50_000)
    alive = []
    watcher = Watcher()
    with serving(transport, watcher) as server, client_of(server) as client:
        client.push(array)
        (served,) = server._service.connections

        def noting(*args, send=served.connection.send, **kwargs):
            alive.append(watcher.num_alive())
            return send(*args, **kwargs)

        monkeypatch.setattr(served.connection, "send", noting)
        for _ in range(10):  # in a thread of the pool first, then where it was read
            client.push(array)
            client.push(array, named=array)
    assert len(alive) >= 20
    assert not any(alive)


def test_an_exception_is_raised_with_its_type_text_and_server(transport):
    with courier(transport) as (client, _):
        with pytest.raises(ValueError, match=r"no good.*`fail` of 'probe'") as caught:
            client.fail("no good")
        assert isinstance(caught.value, RemoteError)
        assert client.address in str(caught.value)
        assert "raise ValueError(text)\nValueError: no good" in (
            caught.value.remote_traceback
        )


def test_an_unknown_method_is_named_with_its_nearest(transport):
    with (
        courier(transport) as (client, _),
        pytest.raises(AttributeError, match=r"`ecko`; did you mean `echo`"),
    ):
        client.ecko(1)


@pytest.mark.parametrize("transport", ENCODED, indirect=True)
def test_what_cannot_be_sent_is_refused_at_the_caller_by_its_path(transport):
    with courier(transport) as (client, _):
        with pytest.raises(EncodeError, match=r"`echo` of .*`args\[0\]\['a'\]`"):
            client.echo({"a": object()})
        with pytest.raises(EncodeError, match=r"`kwargs\['named'\]"):
            client.futures.echo(named=object())
        assert client.echo(1) == 1


@pytest.mark.parametrize("transport", ENCODED, indirect=True)
def test_a_result_that_cannot_be_sent_is_told_to_the_caller_by_its_path(transport):
    with courier(transport) as (client, _):
        with pytest.raises(EncodeError, match=r"`unsendable` returned .*\['a'\]\[1\]"):
            client.unsendable()
        assert client.echo(1) == 1


def test_futures_run_side_by_side(transport):
    with courier(transport) as (client, probe):
        futures = [client.futures.hold(number) for number in range(5)]
        for _ in futures:
            assert probe.started.acquire(timeout=LONG_S)
        probe.go_on.set()
        assert [future.result(LONG_S) for future in futures] == list(range(5))


def test_futures_are_real_ones(transport):
    with courier(transport) as (client, _):
        futures = [client.futures.echo(n) for n in range(20)]
        called = threading.Event()
        futures[3].add_done_callback(lambda _: called.set())
        done, rest = concurrent.futures.wait(futures, timeout=LONG_S)
        assert (len(done), len(rest)) == (20, 0)
        assert called.wait(LONG_S)
        with pytest.raises(ValueError, match="bad"):
            client.futures.fail().result(LONG_S)


def test_a_cancelled_future_reaches_its_handler(transport):
    with courier(transport) as (client, probe):
        future = client.futures.until_cancelled()
        assert probe.started.acquire(timeout=LONG_S)
        assert future.cancel()
        assert probe.saw_cancelled.wait(LONG_S)
        assert future.cancelled()
        assert future in concurrent.futures.wait([future], timeout=0).done
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(0)


def test_a_deadline_is_kept_and_its_error_says_what_the_server_does(transport):
    with courier(transport, client={"heartbeat_s": 0.05}) as (client, probe):
        for timeout_s in (0.4, 4.0, 20.0):
            started_s = time.monotonic()
            with pytest.raises(CallTimeoutError, match="`hold` of 'probe'") as late:
                client.call("hold", timeout_s=timeout_s)
            assert timeout_s <= time.monotonic() - started_s < LONG_S
            if "had run for" in str(late.value):
                break  # a busy machine may not begin it, and be asked, in time
        assert "had run for" in str(late.value)
        assert probe.runs == probe.most_running  # each once


def test_the_deadline_travels_and_the_handler_hears_of_it(transport):
    with courier(transport) as (client, probe):
        for timeout_s in (0.2, 2.0, 20.0):  # a busy machine may not begin it in time
            with pytest.raises(CallTimeoutError):
                client.call("until_cancelled", timeout_s=timeout_s)
            if probe.started.acquire(blocking=False):
                break
        assert probe.saw_cancelled.wait(LONG_S)
        assert 0 < probe.remaining_s <= timeout_s


def test_a_future_keeps_its_deadline(transport):
    with courier(transport) as (client, _):
        future = client.futures.call("hold", timeout_s=0.2)
        with pytest.raises(CallTimeoutError, match="`hold` of 'probe'"):
            future.result(LONG_S)


def test_a_call_whose_deadline_passes_while_it_waits_is_not_run(transport):
    with courier(transport, pool_size=1) as (client, probe):
        first = client.futures.hold()
        assert probe.started.acquire(timeout=LONG_S)
        with pytest.raises(CallTimeoutError):
            client.call("add_once", timeout_s=0.1)
        list_methods(client)  # answered after the server has read that nobody waits
        probe.go_on.set()
        first.result(LONG_S)
        assert client.echo(2) == 2
        assert probe.runs == 1


def test_the_server_answers_for_itself_when_all_its_threads_are_busy(transport):
    with courier(transport, pool_size=1) as (client, probe):
        client.futures.hold()
        assert probe.started.acquire(timeout=LONG_S)
        client.wait_for_ready(timeout_s=LONG_S)
        assert "hold" in list_methods(client)
        assert statistics(client).methods["hold"].running == 1


def test_no_more_handlers_run_than_the_pool_is_large(transport):
    with courier(transport, pool_size=3) as (client, probe):
        futures = [client.futures.hold() for _ in range(10)]
        for _ in range(3):
            assert probe.started.acquire(timeout=LONG_S)
        wait_until(lambda: statistics(client).queued == 7)
        assert statistics(client).running == probe.most_running == 3
        probe.go_on.set()
        concurrent.futures.wait(futures, timeout=LONG_S)
        assert probe.most_running == 3


def test_statistics_count_calls_errors_and_bytes(transport):
    with courier(transport) as (client, _):
        for _ in range(6):
            client.echo("text")
        with pytest.raises(ValueError, match="bad"):
            client.fail()
        # A call is counted when its reply has been sent.
        wait_until(lambda: statistics(client).methods["fail"].calls == 1)
        known = statistics(client).methods
        assert (known["echo"].calls, known["echo"].errors) == (6, 0)
        assert (known["fail"].calls, known["fail"].errors) == (1, 1)
        assert 0 < known["echo"].p50_s <= known["echo"].p99_s < LONG_S
        if transport in ENCODED:
            assert min(known["echo"].bytes_in, known["echo"].bytes_out) >= 6 * 4


def test_many_threads_share_a_client(transport):
    with courier(transport) as (client, _):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            sums = [
                pool.submit(lambda k=k: [client.echo((k, n)) for n in range(40)])
                for k in range(8)
            ]
        for k, results in enumerate(sums):
            assert results.result() == [(k, n) for n in range(40)]


def test_a_callback_of_a_future_may_call_again(transport):
    with courier(transport) as (client, _):
        results, done = [], threading.Event()

        def call_again(_):
            results.append(client.echo("sync"))
            results.append(client.futures.echo("future").result(LONG_S))
            done.set()

        client.futures.echo(1).add_done_callback(call_again)
        assert done.wait(LONG_S)
        assert results == ["sync", "future"]


def test_closing_a_client_ends_its_calls(transport):
    with serving(transport, probe := Probe()) as server:
        client = client_of(server)
        future = client.futures.hold()
        assert probe.started.acquire(timeout=LONG_S)
        client.close()
        with pytest.raises(CallCancelledError, match="closed"):
            future.result(LONG_S)
        with pytest.raises(CallCancelledError, match="closed"):
            client.echo(1)


def test_a_quick_method_and_a_slow_one_of_the_same_client_do_not_meet(transport):
    """The slow one looks quick at first: others must get through all the same."""
    with courier(transport) as (client, probe):
        probe.go_on.set()
        for _ in range(20):
            client.hold()
        probe.go_on.clear()
        slow = client.futures.hold()
        assert client.echo("quick") == "quick"
        probe.go_on.set()
        slow.result(LONG_S)
