import threading

from replicator.rpc.call_statistics import CallRecords


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
        thread.join(10)
    assert records.summary().calls == records.summary().bytes_in == 12_000
