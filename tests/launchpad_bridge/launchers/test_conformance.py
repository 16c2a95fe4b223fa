"""One suite over all launchers: same program, same answers, same failures.

That of the README starts workers with `srun`: SLURM's in an allocation, elsewhere a
stand-in (`bin/srun`), which truly starts them, on this host.
"""

import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import CallTimeoutError, RemoteError
from tests.launchpad_bridge import programs
from tests.launchpad_bridge.programs import SOON_S, counter_and, program_of
from tests.launchpad_bridge.readme import block_with, names_of

LAUNCHERS = {
    "threads": lp.Threads,
    "test": lp.TestMode,
    "test, in order": lambda: lp.TestMode(seed=0),
    "processes": lambda: lp.Processes(terminal="output_to_files"),
    "ray": lambda: ray_cluster().Ray(),
    "slurm": lambda: names_of(block_with("class Slurm"))["Slurm"](),
}
SLOW = {"processes", "ray", "slurm"}
SHARED_PROCESS = {"threads", "test"}


def ray_cluster():
    return pytest.importorskip(
        "replicator.launchpad_bridge.launchers.on_ray.ray_cluster"
    )


@pytest.fixture(scope="module")
def one_ray():
    """Be connected to a Ray, which the launcher then takes: starts take seconds."""
    ray_cluster()
    from replicator.launchpad_bridge.launchers.on_ray import ray_session

    session = ray_session.connect(None, {"num_cpus": 4}, insecure=False)
    yield
    session.close()


@pytest.fixture
def srun(monkeypatch):
    """Let an `srun` be found: outside of an allocation the stand-in."""
    if "SLURM_JOB_ID" not in os.environ:
        folder = Path(__file__).with_name("bin")
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def may_wait_by_other_means(launcher):
    """Skip where every wait must be for an edge."""
    if getattr(launcher, "seed", None) is not None:
        pytest.skip("in a fixed order every wait must be for an edge")


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in LAUNCHERS
    ]
)
def launcher(request):
    if request.param == "ray":
        request.getfixturevalue("one_ray")
    if request.param == "slurm":
        request.getfixturevalue("srun")
    return LAUNCHERS[request.param]()


@pytest.fixture
def run_program(launcher, tmp_path):
    """Launch, wait, return the run."""

    def run_program(program, **options):
        options.setdefault("log_dir", tmp_path / "logs")
        run = lp.launch(program, launcher, **options)
        run.wait(4 * SOON_S)
        return run

    return run_program


def failure_of(run_program, program, **options):
    with pytest.raises(lp.NodeFailedError) as raised:
        run_program(program, **options)
    return raised.value


def test_results_come_back_by_the_names_of_workers(run_program):
    run = run_program(
        program_of(
            lp.PyNode(programs.give, 1),
            lp.PyNode(programs.give, {"a": np.arange(3)}),
            alone=lp.PyNode(programs.give, "x"),
        )
    )
    assert run.results.keys() == {"node/0", "node/1", "alone"}
    assert run.results["node/0"] == 1
    assert run.results["node/1"]["a"].tolist() == [0, 1, 2]


def test_a_handle_becomes_a_client_that_takes_and_returns_arrays(run_program):
    run = run_program(counter_and(do="double", args=(np.ones(3),)))
    assert run.results["caller"].tolist() == [2, 2, 2]


def test_a_handler_knows_which_node_it_is_of(run_program):
    run = run_program(counter_and(do="whoami", args=()))
    assert run.results["caller"] == "counter"


def test_what_a_remote_method_raises_fails_the_caller_and_names_the_edge(run_program):
    error = failure_of(run_program, counter_and(do="fail", args=("why",)))
    assert error.node == "caller"
    assert "caller -> counter" in str(error)
    assert "why" in str(error)


def test_a_node_knows_its_program_its_name_and_its_launcher(run_program, launcher):
    run = run_program(program_of(lp.PyNode(programs.describe_context)))
    assert list(run.results["node"]) == ["tried", "node", launcher.name]


def test_a_failure_names_the_node_and_stops_the_others(run_program):
    started_s = time.monotonic()
    error = failure_of(
        run_program,
        program_of(
            bad=lp.PyNode(programs.fail, "oh no"),
            good=lp.PyNode(programs.wait_for_stop),
        ),
    )
    assert error.node == "bad"
    assert "oh no" in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert time.monotonic() - started_s < SOON_S


def test_a_constructor_that_raises_fails_its_node(run_program):
    program = program_of(bad=lp.CourierNode(programs.fail, "in constructor"))
    assert "in constructor" in str(failure_of(run_program, program))


def test_leaving_with_a_status_is_a_failure_and_without_one_an_end(run_program):
    run_program(program_of(lp.PyNode(programs.leave, None)))
    error = failure_of(run_program, program_of(lp.PyNode(programs.leave, 3)))
    assert "3" in str(error)


@pytest.mark.parametrize("stop", ["stop_all", "thread"])
def test_a_handler_and_a_thread_can_stop_the_program(run_program, stop):
    if stop == "thread":
        run = run_program(program_of(lp.PyNode(programs.stop_in_thread)))
        assert run.results["node"] is True
    else:
        run_program(counter_and(do="stop_all", args=()))


def test_a_stop_handler_of_a_node_is_called(run_program, tmp_path):
    path = tmp_path / "handled"
    run_program(
        program_of(
            handling=lp.PyNode(programs.handle_stop, str(path)),
            stopping=lp.PyNode(lp.stop),
        )
    )
    assert path.read_text() == "handled"


def test_the_launching_script_can_call_and_stop(launcher, tmp_path):
    program = program_of()
    counter = program.add_node(lp.CourierNode(programs.Counter, 5), label="counter")
    with lp.launch(program, launcher, log_dir=tmp_path / "logs"):
        client = counter.dereference()
        assert client.add(1) == 6
        assert not client.is_stopping()


def test_nodes_that_are_configured_may_know_each_other(run_program):
    program = lp.Program("friends")
    a, b = lp.CourierNode(programs.Friend), lp.CourierNode(programs.Friend)
    a.configure(b.create_handle(), "a")
    b.configure(a.create_handle(), "b")
    program.add_node(a, label="a")
    program.add_node(b, label="b")
    assert run_program(program).results == {"a": "b", "b": "a"}


def test_a_deferred_is_made_once_for_each_worker(run_program):
    deferred = lp.Deferred(Counterlike)
    program = program_of(
        lp.PyNode(programs.same_objects, deferred, deferred),
        lp.PyNode(programs.same_objects, deferred, lp.Deferred(Counterlike)),
    )
    assert run_program(program).results == {"node/0": True, "node/1": False}


class Counterlike:
    pass


def test_a_colocation_in_threads_shares_what_is_deferred_and_a_process(run_program):
    program = program_of(
        lp.MultiThreadingColocation([lp.PyNode(programs.give_process) for _ in "ab"])
    )
    first, second = run_program(program).results["node"]
    assert first == second


def test_a_failure_in_a_colocation_names_the_worker_and_the_inner_node(run_program):
    inner = [lp.PyNode(programs.wait_for_stop), lp.PyNode(programs.fail)]
    error = failure_of(run_program, program_of(lp.MultiThreadingColocation(inner)))
    assert error.node == "node"
    assert "oh no" in str(error)


def test_a_colocation_ends_with_the_first_of_its_nodes_if_so_asked(run_program):
    inner = [lp.PyNode(programs.wait_for_stop), lp.PyNode(programs.give, 7)]
    node = lp.MultiThreadingColocation(inner, return_on_first_completed=True)
    assert 7 in run_program(program_of(node)).results["node"]


def test_a_cacher_answers_with_what_it_was_told_not_long_ago(run_program):
    program = lp.Program("cached")
    versions = program.add_node(lp.CourierNode(programs.Versions), label="versions")
    cacher = program.add_node(lp.CacherNode(versions, 60_000, 60_000), label="cacher")
    program.add_node(lp.PyNode(programs.ask_often, cacher, 20), label="asker")
    assert set(run_program(program).results["asker"]) == {"v1"}


def test_calls_of_a_batched_handler_meet(run_program, launcher):
    may_wait_by_other_means(launcher)
    program = lp.Program("batched")
    server = program.add_node(
        lp.CourierNode(programs.Predictor, 4, courier_kwargs={"thread_pool_size": 4}),
        label="server",
    )
    program.add_node(lp.PyNode(programs.call_in_batch, server, 4), label="client")
    assert run_program(program).results["client"] == [0, 4, 8, 12]


def test_a_group_that_restarts_has_its_failed_worker_started_again(
    run_program, tmp_path
):
    program = lp.Program("restarted")
    restart = lp.Restart(attempts=3, backoff_s=0.01)
    with program.group("node", restart=restart):
        program.add_node(lp.PyNode(programs.fail_until, str(tmp_path / "n"), 2))
    run = run_program(program)
    assert run.results["node"] == 3
    assert run.workers["node"].attempt == 2


def test_restarts_without_progress_end_and_the_first_failure_is_told(
    run_program, tmp_path
):
    program = lp.Program("given up")
    restart = lp.Restart(attempts=2, backoff_s=0.01)
    with program.group("node", restart=restart):
        program.add_node(lp.PyNode(programs.fail_until, str(tmp_path / "n"), 99))
    assert "attempt 1" in str(failure_of(run_program, program))
    assert (tmp_path / "n").read_text() == "xxx"


def test_a_worker_that_sigterm_stops_is_preempted_and_starts_again_if_it_may(
    run_program, launcher
):
    if launcher.name in SHARED_PROCESS:
        pytest.skip("a signal is one of the whole process")
    program = lp.Program("preempted")
    with program.group("node", restart=lp.Restart(attempts=1, backoff_s=0.01)):
        program.add_node(lp.PyNode(programs.be_preempted, 1))
    assert run_program(program).results["node"] == 1
    program = program_of(lp.PyNode(programs.be_preempted, 1))
    assert "`node` was preempted: it got SIG" in str(failure_of(run_program, program))


def test_a_node_that_never_becomes_ready_fails_its_caller_in_bounded_time(run_program):
    program = lp.Program("unready")
    silent = program.add_node(
        lp.CourierNode(
            programs.wait_for_stop, courier_client_kwargs={"call_timeout": 1}
        ),
        label="silent",
    )
    program.add_node(lp.CourierNode(programs.Caller, silent), label="caller")
    error = failure_of(run_program, program)
    assert error.node == "caller"
    assert "caller -> silent: silent does not listen" in str(error)


def test_two_constructors_that_wait_for_each_other_are_told_so(run_program):
    program = lp.Program("embrace")
    options = {"courier_client_kwargs": {"call_timeout": 1}}
    a = lp.CourierNode(programs.Impatient, **options)
    b = lp.CourierNode(programs.Impatient, **options)
    a.configure(b.create_handle())
    b.configure(a.create_handle())
    program.add_node(a, label="a")
    program.add_node(b, label="b")
    assert "constructors that call each other" in str(failure_of(run_program, program))


def test_two_handlers_that_wait_for_each_other_end_in_bounded_time(
    run_program, launcher
):
    may_wait_by_other_means(launcher)
    program = lp.Program("tangle")
    options = {
        "courier_kwargs": {"thread_pool_size": 1},
        "courier_client_kwargs": {"call_timeout": 1},
    }
    a, b = (lp.CourierNode(programs.Tangled, **options) for _ in "ab")
    a.configure(b.create_handle(), begins=True)
    b.configure(a.create_handle(), begins=False)
    program.add_node(a, label="a")
    program.add_node(b, label="b")
    error = failure_of(run_program, program)
    assert error.node == "a"
    assert "a -> b" in str(error)
    assert isinstance(error.__cause__, CallTimeoutError | RemoteError)


def test_a_port_that_is_taken_fails_its_node_by_name(run_program, launcher):
    pytest.importorskip("grpc")
    may_wait_by_other_means(launcher)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        program = program_of(
            robbed=lp.CourierNode(programs.Counter, courier_kwargs={"port": port}),
            other=lp.PyNode(programs.wait_for_stop),
        )
        error = failure_of(run_program, program)
    assert error.node == "robbed"
    assert f"127.0.0.1:{port}" in str(error)


def test_a_server_of_the_users_own_has_a_port_that_its_clients_know(
    run_program, launcher
):
    may_wait_by_other_means(launcher)
    address = lp.Address("sums")
    server = lp.PyNode(programs.sum_from, address, [1, 2, 3])
    address.assign(server)
    program = program_of(server=server, client=lp.PyNode(programs.read_from, address))
    assert run_program(program).results["client"] == 6


def test_who_does_not_stop_is_killed_after_the_grace(run_program):
    program = program_of(
        deaf=lp.PyNode(programs.never_stop), stopping=lp.PyNode(lp.stop)
    )
    started_s = time.monotonic()
    run_program(program, stop_grace_s=0.2)
    assert time.monotonic() - started_s < SOON_S


def test_a_program_may_be_launched_again_once_it_is_over(run_program):
    program = counter_and()
    assert run_program(program).results["caller"] == 1
    assert run_program(program).results["caller"] == 1


def test_nothing_of_a_run_is_left_but_its_logs(run_program):
    run = run_program(counter_and())
    assert not run.plan.folder.exists()


def test_a_group_gets_its_environment(run_program, launcher):
    if launcher.name in SHARED_PROCESS:
        pytest.skip("threads share one environment")
    program = lp.Program("environment")
    with program.group("node", resources=lp.Resources(env={"LP_TRIED": "yes"})):
        program.add_node(lp.PyNode(environment, "LP_TRIED"))
    assert run_program(program).results["node"] == "yes"


def environment(name):
    import os

    return os.environ.get(name)
