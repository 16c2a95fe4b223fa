import threading

import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import LaunchError, NodeFailedError
from replicator.launchpad_bridge.view.watching.watcher import Watcher
from replicator.rpc.security.secret import Secret
from tests.launchpad_bridge.programs import SOON_S, Counter
from tests.rpc.courier_cases import wait_until


class Caller:
    """Calls its counter when it is told to."""

    def __init__(self, counter):
        self._counter = counter

    def go(self, times):
        for _ in range(times):
            self._counter.add(1)


def program():
    made = lp.Program("watched")
    counter = made.add_node(lp.CourierNode(Counter), label="counter")
    with made.group("callers"):
        handles = [made.add_node(lp.CourierNode(Caller, counter)) for _ in range(2)]
    return made, handles


@pytest.fixture(params=["threads", pytest.param("processes", marks=pytest.mark.slow)])
def watched(request):
    made, handles = program()
    with (
        # A process that has only begun to start is not stopped within 10 s on a busy host.
        lp.launch(made, launch_type=request.param, stop_grace_s=120.0) as run,
        Watcher(run.plan.folder) as watcher,
    ):
        yield run, watcher, [handle.dereference() for handle in handles]


def test_calls_are_seen_at_the_node_and_at_its_edges(watched):
    _, watcher, (first, second) = watched
    first.go(30)
    second.go(12)
    wait_until(lambda: counter_of(watcher.sample()).methods["add"].calls == 42)
    watcher.sample()
    first.go(5)
    wait_until(lambda: traffic_of(watcher.sample()) == {0: 35, 1: 12})


def test_rates_are_those_since_the_last_look(watched):
    _, watcher, (first, _) = watched
    first.go(1)
    wait_until(lambda: traffic_of(watcher.sample())[0] == 1)
    first.go(50)
    seen = []
    wait_until(lambda: seen.append(watcher.sample()) or traffic_of(seen[-1])[0] == 51)
    assert sum(edge.calls_per_s for sample in seen for edge in sample.edges) > 0
    assert sum(counter_of(sample).bytes_per_s for sample in seen) > 0


def test_states_are_seen(watched):
    run, watcher, _ = watched
    wait_until(lambda: watcher.sample().phase == "running")
    assert {w.name: w.state for w in watcher.sample().workers} == {
        "counter": "running",
        "callers/0": "running",
        "callers/1": "running",
    }
    run.stop_and_wait()
    after = watcher.sample()
    assert (after.phase, after.stopped_by) == ("ended", "the launcher")
    assert {worker.outcome for worker in after.workers} == {"stopped"}


def counter_of(sample):
    return sample.workers[0]


def traffic_of(sample):
    return {i: edge.calls for i, edge in enumerate(sample.edges)}


def fail_when(counter):
    lp.wait_for_stop(0.0)
    while counter.add(1) < 3:
        pass
    raise ValueError("oh no")


def test_why_a_run_failed_is_read_after_it_is_gone():
    made = lp.Program("failing")
    counter = made.add_node(lp.CourierNode(Counter), label="counter")
    gate = threading.Event()
    made.add_node(
        lp.PyNode(lambda c: gate.wait(SOON_S) and fail_when(c), counter), label="bad"
    )
    run = lp.launch(made, launch_type="threads")
    with Watcher(run.plan.folder) as watcher:
        wait_until(lambda: watcher.note().phase == "running")
        gate.set()
        with pytest.raises(NodeFailedError):
            run.wait()
        assert not run.plan.folder.exists()
        sample = watcher.sample()
    assert sample.phase == "ended"
    assert sample.failure == "`bad` raised ValueError: oh no"


def test_it_leaves_no_thread_and_no_connection():
    made, (handle, _) = program()
    with lp.launch(made, launch_type="threads") as run:
        handle.dereference().go(1)
        before = {thread.name for thread in threading.enumerate()}
        with Watcher(run.plan.folder) as watcher:
            watcher.sample()
            watcher.rest()
            watcher.sample()
        wait_until(lambda: not ours(before))


def ours(before):
    """Return the threads that looking has started here, but those of servers."""
    new = {thread.name for thread in threading.enumerate()} - before
    return {name for name in new if name.startswith("replicator look")}


def test_who_has_another_secret_is_told_nothing():
    made, (handle, _) = program()
    with lp.launch(made, launch_type="threads") as run:
        handle.dereference().go(1)
        secret = run.plan.folder / "secret"
        secret.unlink()
        Secret.generate().write(secret)
        with Watcher(run.plan.folder) as watcher:
            sample = watcher.sample()
    assert {worker.answers for worker in sample.workers} == {False}
    assert not any(worker.methods for worker in sample.workers)


def test_a_folder_without_a_program_is_refused(tmp_path):
    with pytest.raises(LaunchError, match="It may have ended"):
        Watcher(tmp_path)


def test_a_run_whose_folder_went_before_it_was_read_has_ended():
    made, _ = program()
    with lp.launch(made, launch_type="threads") as run:
        watcher = Watcher(run.plan.folder)
    assert not run.plan.folder.exists()
    assert watcher.sample().phase == "ended"
    watcher.close()
