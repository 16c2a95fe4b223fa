"""A place in the pool is left, whatever becomes of the call that had it."""

import types

import pytest

from replicator.rpc.server.handler_pool import HandlerPool


class WorkerThreads:
    """Has no thread to give the first time."""

    def __init__(self):
        self.tasks = []

    def run(self, task):
        self.tasks.append(task)
        if len(self.tasks) == 1:
            raise RuntimeError("the system gives no thread")


class Caller:
    def run(self, call):
        raise ValueError("before it ran")


def call():
    return types.SimpleNamespace(caller=Caller())


def test_a_place_is_left_when_the_system_gives_no_thread():
    pool = HandlerPool(1, threads := WorkerThreads())
    with pytest.raises(RuntimeError):
        pool.submit(call())
    assert pool.num_running == 0
    pool.submit(call())
    assert len(threads.tasks) == 2
