"""One thread reads a connection: the selector loop's, or one of its own."""

from replicator.rpc.server.read_handoff import ReadHandoff
from replicator.rpc.server.selector_loop import SelectorLoop
from replicator.rpc.server.worker_threads import WorkerThreads


class Elsewhere:
    """A connection that a thread of its own reads by now."""

    descriptor = -1
    is_listed = True
    is_paused = False

    @property
    def connection(self):
        raise AssertionError("two threads read it")


def test_who_was_listed_twice_and_has_a_thread_of_its_own_is_not_read():
    loop = SelectorLoop(ReadHandoff(), WorkerThreads("test"))
    assert loop._read_one(Elsewhere(), reader=None)
