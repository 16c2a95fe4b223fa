"""Threads that share one link: nobody waits for a waking that does not come."""

import concurrent.futures
import random
import threading
import time

import pytest

from tests.rpc.courier_cases import LONG_S, courier

# So long that a lost waking shows as a late call, not as one that a tick repairs.
HEARTBEAT_S = 1000.0
LATE_S = 300.0


@pytest.mark.parametrize("transport", ["in-process", "unix", "grpc"])
def test_sync_calls_futures_and_cancellations_beside_each_other(transport):
    with courier(transport, client={"heartbeat_s": HEARTBEAT_S}) as (client, _):
        longest = concurrent.futures.ThreadPoolExecutor(8)
        with longest as pool:
            jobs = [
                pool.submit(job, client, seed)
                for seed in range(3)
                for job in (call_often, send_futures, cancel_some)
            ]
            took_s = [job.result(LATE_S) for job in jobs]
    assert max(took_s) < LATE_S


def call_often(client, seed):
    longest_s = 0.0
    for number in range(150):
        started_s = time.monotonic()
        assert client.echo((seed, number)) == (seed, number)
        longest_s = max(longest_s, time.monotonic() - started_s)
    return longest_s


def send_futures(client, seed):
    chosen = random.Random(seed)
    longest_s = 0.0
    for burst in range(12):
        started_s = time.monotonic()
        futures = [client.futures.echo(n) for n in range(chosen.randrange(1, 20))]
        if burst % 2:
            concurrent.futures.wait(futures, timeout=LONG_S)
        assert [future.result(LONG_S) for future in futures] == list(
            range(len(futures))
        )
        longest_s = max(longest_s, time.monotonic() - started_s)
    return longest_s


def cancel_some(client, seed):
    chosen = random.Random(seed)
    started_s = time.monotonic()
    for number in range(60):
        future = client.futures.echo(number)
        if chosen.random() < 0.5:
            future.cancel()
        if not future.cancelled():
            assert future.result(LONG_S) == number
    return time.monotonic() - started_s


def test_a_leader_that_leaves_hands_the_reading_on():
    """The first of two callers reads; when it is answered the other must read."""
    with courier("unix", client={"heartbeat_s": HEARTBEAT_S}) as (client, probe):
        first = threading.Thread(target=client.echo, args=("first",))
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            held = [pool.submit(client.hold, n) for n in range(4)]
            for _ in held:
                assert probe.started.acquire(timeout=LONG_S)
            first.start()
            first.join(LONG_S)
            probe.go_on.set()
            started_s = time.monotonic()
            assert [each.result(LONG_S) for each in held] == [0, 1, 2, 3]
            assert time.monotonic() - started_s < LATE_S


def test_futures_are_read_after_a_sync_caller_read_for_them():
    with courier("unix", client={"heartbeat_s": HEARTBEAT_S}) as (client, probe):
        future = client.futures.hold("held")
        assert probe.started.acquire(timeout=LONG_S)
        for number in range(50):
            assert client.echo(number) == number
        probe.go_on.set()
        started_s = time.monotonic()
        assert future.result(LONG_S) == "held"
        assert time.monotonic() - started_s < LATE_S


def test_the_thread_for_futures_sleeps_and_wakes_again():
    with courier("unix") as (client, _):
        for pause_s in (0.0, 0.001, 0.01, 0.05) * 5:
            assert client.futures.echo(pause_s).result(LONG_S) == pause_s
            threading.Event().wait(pause_s)


def test_a_callback_that_ends_its_thread_ends_no_other_future(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def end(_):
        raise SystemExit

    with courier("unix", client={"heartbeat_s": HEARTBEAT_S}) as (client, probe):
        held = [client.futures.hold(n) for n in range(3)]
        # Held, too: the callback of a future that is done runs in this thread.
        ends = client.futures.hold("ends")
        ends.add_done_callback(end)
        probe.go_on.set()
        assert [future.result(LONG_S) for future in held] == [0, 1, 2]
        # Or it would be done when the client closes, and end this thread.
        assert ends.result(LONG_S) == "ends"
        assert client.futures.echo(2).result(LONG_S) == 2


def test_a_callback_of_a_cancelled_future_may_cancel_another():
    with courier("unix") as (client, _):
        first, second = client.futures.hold(), client.futures.hold()
        first.add_done_callback(lambda _: second.cancel())
        assert first.cancel()
        assert first.cancel()
        assert second.cancelled()
