import contextlib
import dataclasses
import threading
import types

import pytest

from replicator.rpc.call_statistics import CallRecords
from replicator.rpc.client.client import Client, statistics
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import Registry
from replicator.rpc.own_methods import HELLO
from replicator.rpc.server.server import Server
from replicator.rpc.server.service import Service
from tests.rpc.courier_cases import wait_until


def summary_of(calls, **now):
    records = CallRecords()
    for call in calls:
        records.add(*call)
    return records.summary(**now)


def test_nothing_is_known_before_the_first_call():
    summary = summary_of([])
    assert (summary.calls, summary.errors, summary.p50_s, summary.p99_s) == (0, 0, 0, 0)


def test_calls_errors_and_bytes_are_added_up():
    summary = summary_of([(1.0, 10, 1, False), (1.0, 20, 2, True), (1.0, 30, 3, True)])
    assert (summary.calls, summary.errors) == (3, 2)
    assert (summary.bytes_in, summary.bytes_out) == (60, 6)


def test_percentiles_are_of_the_times_of_calls():
    summary = summary_of([(float(ms), 0, 0, False) for ms in range(100)])
    assert (summary.p50_s, summary.p99_s) == (50.0, 99.0)


def test_one_call_is_every_percentile():
    summary = summary_of([(2.0, 0, 0, False)])
    assert (summary.p50_s, summary.p99_s) == (2.0, 2.0)


def test_old_times_are_forgotten_and_their_calls_are_not():
    summary = summary_of([(9.0, 0, 0, False)] * 5000 + [(1.0, 0, 0, False)] * 1024)
    assert (summary.calls, summary.p99_s) == (6024, 1.0)


def test_calls_that_wait_and_run_are_passed_on():
    summary = summary_of([], queued=3, running=2)
    assert (summary.queued, summary.running) == (3, 2)


def test_no_record_is_lost_between_threads():
    records = CallRecords()

    def add_many():
        for _ in range(3000):
            records.add(0.0, 1, 1, False)

    threads = [threading.Thread(target=add_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert records.summary().calls == records.summary().bytes_in == 12_000


def test_calls_are_counted_by_who_said_its_name():
    with (
        Server(Counter(), address="inproc:") as server,
        contextlib.ExitStack() as stack,
    ):
        first, nameless, second, again = [
            stack.enter_context(Client(server.address, name=name))
            for name in ("actor/0", "", "actor/1", "actor/0")
        ]
        for client, calls in ((first, 1), (nameless, 2), (second, 3), (again, 4)):
            for number in range(calls):
                client.add(number)
        counted = {"actor/0": 5, "actor/1": 3}
        wait_until(lambda: calls_by_caller(server) == counted)
        assert server.statistics().methods["add"].calls == 10


def calls_by_caller(server):
    known = server.statistics().callers
    return {name: caller.calls for name, caller in known.items()}


def test_bytes_of_a_caller_are_added_up():
    records = CallRecords(kept_times=0)
    for size in (1, 4):
        records.add(0.0, size, 10 * size, False)
    assert dataclasses.astuple(records.of_caller()) == (2, 5, 50)


def test_new_names_without_end_take_no_memory_without_end():
    service = Service(
        {}, label="server", pool_size=1, limits=MessageLimits(), registry=Registry()
    )
    for number in range(5000):
        assert (service.records_of(f"stranger {number}") is None) == (number >= 256)
    assert len(service._callers) == 256
    assert service.records_of("stranger 7") is not None


def test_names_that_only_connect_take_no_place_of_those_that_call():
    service = Service(
        {}, label="server", pool_size=1, limits=MessageLimits(), registry=Registry()
    )
    for number in range(300):
        service.answer(HELLO, types.SimpleNamespace(), [f"stranger {number}"])
    assert service.records_of("actors/0") is not None


class Counter:
    def add(self, number):
        return number


@pytest.mark.parametrize("address", ["inproc:", "unix:"])
def test_a_server_tells_what_each_client_called(address):
    with Server(Counter(), address=address) as server:
        with Client(server.address, name="actor/3") as named:
            named.wait_for_ready(timeout_s=60.0)
            for number in range(3):
                named.add(number)
        with Client(server.address) as nameless:
            nameless.add(1)
            # A call is counted once its reply was sent: soon after that was read.
            wait_until(lambda: statistics(nameless).methods["add"].calls == 4)
            known = statistics(nameless)
    assert {name: c.calls for name, c in known.callers.items()} == {"actor/3": 3}
