import logging
import threading

from replicator.rpc.server.worker_threads import WorkerThreads
from tests.rpc.courier_cases import wait_until


def test_each_task_has_a_thread_of_its_own():
    threads, met = WorkerThreads("test"), threading.Barrier(9)
    for _ in range(8):
        threads.run(lambda: met.wait(60))
    met.wait(60)
    assert threads.close(60)


def test_a_thread_is_used_again():
    threads, seen = WorkerThreads("test"), []
    for _ in range(20):
        done = threading.Event()
        threads.run(lambda done=done: (seen.append(threading.get_ident()), done.set()))
        assert done.wait(60)
    assert len(set(seen)) < 20
    assert threads.close(60)


def test_a_thread_without_tasks_ends():
    threads, ended = WorkerThreads("test", idle_s=0.01), threading.Event()
    threads.run(lambda: None)
    for _ in range(1000):
        if not len(threads._members):
            break
        ended.wait(0.01)
    assert len(threads._members) == 0


def test_a_task_that_raises_is_told_and_its_thread_goes_on(caplog):
    threads, done = WorkerThreads("test"), threading.Event()
    with caplog.at_level(logging.ERROR):
        threads.run(lambda: 1 / 0)
        threads.run(done.set)
        assert done.wait(60)
        assert threads.close(60)
    assert "ZeroDivisionError" in caplog.text


def test_closing_says_whether_all_have_ended():
    threads, hold = WorkerThreads("test"), threading.Event()
    threads.run(lambda: hold.wait(60))
    assert not threads.close(0.01)
    hold.set()
    assert threads.close(60)
    assert len(threads._members) == 0


def test_a_thread_that_is_about_to_start_has_not_ended(monkeypatch):
    threads, done = WorkerThreads("test"), threading.Event()
    ended = []
    start = threading.Thread.start

    def start_behind_a_close(thread):
        ended.append(threads.close(0.01))
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_behind_a_close)
    threads.run(done.set)
    assert ended == [False]
    assert done.wait(60)
    assert threads.close(60)


def test_threads_closed_by_one_of_their_own_does_not_wait_for_it():
    threads, ended = WorkerThreads("test"), []
    done = threading.Event()
    threads.run(lambda: (ended.append(threads.close(60)), done.set()))
    assert done.wait(60)
    assert ended == [True]


def test_few_threads_wait_for_tasks():
    threads, met = WorkerThreads("test", max_idle=2), threading.Barrier(9)
    for _ in range(8):
        threads.run(lambda: met.wait(60))
    met.wait(60)
    wait_until(lambda: len(threads._members) <= 2)
    assert threads.close(60)


def test_a_task_for_which_the_system_has_no_thread_is_done_later(monkeypatch):
    threads, hold, done = WorkerThreads("test"), threading.Event(), threading.Event()
    threads.run(lambda: hold.wait(60))

    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    threads.run(done.set)
    assert not done.is_set()
    hold.set()
    assert done.wait(60)
    assert threads.close(60)
