import threading
import time

import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ArgumentError, EncodeError
from replicator.launchpad_bridge.launchers.threads import ThreadWorkers
from replicator.launchpad_bridge.running.results import Results, Unsendable
from tests.launchpad_bridge.programs import program_of


def waiting():
    return lp.PyNode(lp.wait_for_stop, 20)


def fail():
    raise ValueError("why")


def test_wait_raises_once_the_others_have_stopped_too():
    stopped = []

    def stop_slowly():
        lp.wait_for_stop(20)
        time.sleep(0.05)
        stopped.append(True)

    run = lp.launch(program_of(bad=lp.PyNode(fail), slow=lp.PyNode(stop_slowly)))
    with pytest.raises(lp.NodeFailedError, match="`bad` raised ValueError: why"):
        run.wait(60)
    assert stopped == [True]
    assert run.is_over


def test_a_failure_is_raised_each_time_and_kept():
    run = lp.launch(program_of(bad=lp.PyNode(fail)))
    for _ in range(2):
        with pytest.raises(lp.NodeFailedError) as raised:
            run.wait(60)
        assert isinstance(raised.value.__cause__, ValueError)
    assert run.failure is not None
    assert run.failure.node == "bad"


def test_wait_gives_up_after_its_time_and_says_who_runs():
    with lp.launch(program_of(a=waiting(), b=lp.PyNode(int))) as run:
        run.wait(60, labels=["b"])
        with pytest.raises(lp.RunTimeoutError, match="got a still running"):
            run.wait(0.01)


def test_a_result_that_cannot_be_sent_says_so_when_it_is_asked_for():
    found = {"a": 1, "b": Unsendable(reason="`x` is a thread. Send its name.")}
    results = Results(found)
    assert results["a"] == 1
    assert set(results) == {"a", "b"}
    with pytest.raises(EncodeError, match=r"`b` must return .* `x` is a thread\."):
        results["b"]
    with pytest.raises(EncodeError):
        dict(results)
    with pytest.raises(KeyError):
        results["c"]


@pytest.mark.slow
def test_a_process_whose_result_cannot_be_sent_has_done_its_work():
    program = program_of(a=lp.PyNode(threading.Thread), b=lp.PyNode(int))
    run = lp.launch(program, lp.Processes(terminal="output_to_files"))
    run.wait(60)
    assert run.results["b"] == 0
    with pytest.raises(EncodeError, match=r"`a` must return .*got a threading\.Thread"):
        run.results["a"]


def test_a_run_can_be_waited_for_from_any_thread_and_by_many():
    run = lp.launch(program_of(a=waiting()))
    threads = [threading.Thread(target=run.wait, args=(20,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    run.stop()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_a_run_can_be_launched_from_any_thread():
    results = []

    def launch():
        run = lp.launch(program_of(a=lp.PyNode(int, "3")))
        run.wait(60)
        results.append(run.results)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join(60)
    assert results == [{"a": 3}]


def test_the_results_of_a_group_are_a_list_of_any_length():
    program = program_of(lp.PyNode(int, 1), lp.PyNode(int, 2), a=lp.PyNode(int, 3))
    with lp.launch(program) as run:
        run.wait(60)
        assert run.results_of("node") == [1, 2]
        assert run.results_of("a") == [3]
        with pytest.raises(lp.LaunchError, match="must be a list of groups"):
            run.results_of("b")


def test_a_node_that_runs_has_no_result_yet():
    with lp.launch(program_of(a=waiting())) as run:
        assert run.results_of("a") == [None]


def test_waiting_for_some_groups_leaves_the_others_running():
    with lp.launch(program_of(a=waiting(), b=lp.PyNode(int, 4))) as run:
        run.wait(60, labels=["b"])
        assert run.results == {"b": 4}
        assert not run.is_over
        run.wait(60, return_on_first_completed=True)
        assert not run.is_over


def test_groups_that_are_not_there_cannot_be_waited_for():
    with lp.launch(program_of(a=waiting())) as run:
        for labels in (["b"], "a"):
            with pytest.raises(lp.LaunchError, match="`labels` must be a list"):
                run.wait(labels=labels)


def test_a_node_that_waits_for_its_own_run_is_told_so():
    runs = []

    def wait():
        while not runs:
            lp.wait_for_stop(0.01)
        runs[0].wait()

    runs.append(lp.launch(program_of(a=lp.PyNode(wait))))
    with pytest.raises(lp.NodeFailedError, match="which would wait for itself"):
        runs[0].wait(60)


def test_the_end_of_the_block_stops_the_run_and_raises_its_failure():
    with lp.launch(program_of(a=waiting())) as run:
        pass
    assert run.is_over
    run = lp.launch(program_of(bad=lp.PyNode(fail)))
    with pytest.raises(lp.NodeFailedError, match="why"), run:
        run.wait_for_stop(20)


def test_an_error_in_the_block_is_told_with_the_failure_besides():
    run = lp.launch(program_of(bad=lp.PyNode(fail)))
    run.wait_for_stop(20)
    with pytest.raises(KeyError) as raised, run:
        raise KeyError("own")
    assert "Besides, a node failed: `bad`" in raised.value.__notes__[0]


def test_an_error_of_the_block_that_comes_from_a_dead_node_gives_way_to_its_cause():
    class Fragile:
        def __init__(self):
            self.called = threading.Event()

        def touch(self):
            self.called.set()
            threading.Event().wait(5)

        def run(self):
            self.called.wait(60)
            raise ValueError("broken")

    program = lp.Program("p")
    handle = program.add_node(lp.CourierNode(Fragile), label="fragile")
    failed = pytest.raises(lp.NodeFailedError, match="`fragile` raised ValueError")
    with failed, lp.launch(program):
        handle.dereference().touch()


def test_stop_may_be_called_again_and_after_the_end():
    run = lp.launch(program_of(a=waiting()))
    for _ in range(3):
        run.stop()
    run.stop_and_wait()
    run.stop()
    run.wait(60)
    assert run.wait_for_stop(0)
    assert run.stop_event().is_set()


def test_workers_tell_where_they_are():
    with lp.launch(program_of(a=waiting(), b=lp.PyNode(int))) as run:
        run.wait(60, labels=["b"])
        assert run.workers["a"].phase == "running"
        assert run.workers["b"].exited.outcome == "returned"
    assert run.workers["a"].exited.outcome == "stopped"


class Broken:
    """A launcher that breaks its promises, one after the other."""

    name = "broken"

    def __init__(self, what):
        self.what = what

    def open(self, plan, report):
        if self.what == "open":
            raise lp.LaunchError("no room")
        return self._Workers(self, ThreadWorkers(plan, report, launch_type=self.name))

    class _Workers:
        def __init__(self, of, workers):
            self.of, self.workers = of, workers

        def start(self, executable, attempt):
            if self.of.what == "start" and executable.name == "b":
                raise lp.LaunchError("no room for b")
            return self.workers.start(executable, attempt)

        def close(self):
            if self.of.what == "close":
                raise RuntimeError("stuck door")


def test_a_launcher_that_cannot_open_leaves_nothing_of_the_run():
    program = program_of(a=lp.PyNode(int))
    with pytest.raises(lp.LaunchError, match="no room"):
        lp.launch(program, Broken("open"))
    lp.launch(program).wait(60)


@pytest.mark.parametrize(
    ("what", "node", "text"),
    [("start", "b", "no room for b"), ("close", "the launcher", "stuck door")],
)
def test_what_goes_wrong_in_a_launcher_fails_the_run(what, node, text):
    run = lp.launch(program_of(a=waiting(), b=lp.PyNode(lp.stop)), Broken(what))
    with pytest.raises(lp.NodeFailedError, match=text) as raised:
        run.wait(60)
    assert raised.value.node == node


def test_what_is_no_program_is_refused():
    with pytest.raises(ArgumentError, match=r"must be an `lp\.Program`"):
        lp.launch([])
    with pytest.raises(ArgumentError, match=r"must be an `lp\.Program`"):
        lp.launch(object())  # type: ignore[arg-type]


def test_of_several_programs_the_first_is_launched(capsys):
    programs = [program_of(a=lp.PyNode(int, n)) for n in (1, 2)]
    run = lp.launch(programs)
    run.wait(60)
    assert run.results == {"a": 1}
    assert "Launching only the first" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["threads", "local_mt", "test", "test_mt"])
def test_launch_types_have_our_names_and_launchpads(name):
    run = lp.launch(program_of(a=lp.PyNode(int)), name)
    run.wait(60)
    assert run.results == {"a": 0}


@pytest.mark.parametrize("name", ["vertex_ai", "local_docker", "warp"])
def test_launch_types_that_do_not_exist_here_are_refused(name):
    with pytest.raises(ArgumentError, match="`launch_type` must be one"):
        lp.launch(program_of(a=lp.PyNode(int)), name)


def test_launch_types_tell_whether_they_are_local():
    assert lp.is_local_launch("local_mt")
    assert not lp.is_local_launch(lp.LaunchType.TEST_MULTI_THREADING)
    assert lp.is_local_launch_or_test("test_mp")
    assert not lp.is_local_launch_or_test("ray")


def test_environment_variables_under_threads_are_named_as_not_set(caplog):
    program = program_of(a=lp.PyNode(int))
    lp.launch(program, local_resources={"a": lp.PythonProcess(env={"X": 1})}).wait(60)
    assert "that of a is not set" in caplog.text


def test_a_thread_that_cannot_be_stopped_is_left_behind_and_named(caplog):
    may_end = threading.Event()
    program = program_of(deaf=lp.PyNode(may_end.wait, 20), b=lp.PyNode(lp.stop))
    run = lp.launch(program, stop_grace_s=0.05)
    run.wait(60)
    may_end.set()
    assert "killing `deaf`: not stopped within the grace" in caplog.text
