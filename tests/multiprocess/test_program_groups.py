"""Groups of processes in programs, joined by JAX, on processes and on Ray."""

import os
import signal
import subprocess
import sys

import pytest

import replicator.launchpad_bridge as lp
from replicator.checkpoint import CheckpointStore
from tests.multiprocess import group_nodes as nodes
from tests.multiprocess.processes import ROOT
from tests.multiprocess.worker_processes import is_alive, wait_dead, wait_file
from tests.steps import assert_equal_bits

pytestmark = pytest.mark.slow

TIMEOUT_S = 300.0


def group_of(function, *args, restart=None, program=None):
    """Return a program with a group of two processes that run a function."""
    program = program or lp.Program("grouped")
    with program.group("learner", resources=nodes.CPU, restart=restart):
        program.add_node(lp.JaxProcesses(function, *args, processes=2))
    return program


def test_members_are_one_group_to_jax_and_the_first_s_result_is_the_group_s(running):
    with running(group_of(nodes.total, 20)) as run:
        run.wait(TIMEOUT_S)
    assert run.results["learner"] == (41, 2, 0)
    assert run.results_of("learner") == [(41, 2, 0), (41, 2, 1)]


def test_each_member_calls_by_a_client_of_its_own(running):
    program = lp.Program("grouped")
    adder = program.add_node(lp.CourierNode(nodes.Adder), label="adder")
    group_of(nodes.call, adder, program=program)
    with running(program) as run:
        run.wait(TIMEOUT_S, labels=["learner"])
        assert adder.dereference().add(0) == 2
    assert len(set(run.results["learner"])) == 2


def test_a_killed_member_takes_the_others_along_and_all_start_again(running, tmp_path):
    restart = lp.Restart(attempts=2, backoff_s=0.1)
    with running(group_of(nodes.meet_again, tmp_path, 3, restart=restart)) as run:
        for attempt, victim in enumerate([1, 0]):
            pids = [int(wait_file(tmp_path / f"{attempt}-{rank}")) for rank in (0, 1)]
            os.kill(pids[victim], signal.SIGKILL)
            wait_dead(pids, within_s=TIMEOUT_S)
        run.wait(TIMEOUT_S)
    assert run.results["learner"] == [[2, "2"], [2, "2"]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bug_fails_the_run_by_the_name_of_the_member_that_has_it(running, rank):
    run = running(group_of(nodes.fail_in_one, rank))
    words = f"`learner/{rank}` raised KeyError"
    with pytest.raises(lp.NodeFailedError, match=words) as told:
        run.wait(TIMEOUT_S)
    assert isinstance(told.value.__cause__, KeyError)


def test_a_learner_that_lost_a_process_ends_with_the_bits_of_one_that_did_not(tmp_path):
    ended = []
    for dies in (True, False):
        restart = lp.Restart(attempts=1, backoff_s=0.1)
        program = group_of(nodes.train, tmp_path / str(dies), dies, restart=restart)
        with lp.launch(program, "processes", log_dir=tmp_path / "logs") as run:
            run.wait(TIMEOUT_S)
        assert run.workers["learner/0"].attempt == dies
        ended.append(run.results["learner"])
    (replicas, params), (_, others) = ended
    assert replicas == 2
    assert_equal_bits(params, others)


def test_the_stop_of_the_program_ends_a_group_in_step(running, tmp_path):
    with running(group_of(nodes.stop_together, tmp_path), stop_grace_s=30.0) as run:
        for rank in (0, 1):
            wait_file(tmp_path / str(rank))
    assert run.results_of("learner") == [["0", "1"]] * 2


def test_a_learner_of_several_processes_stops_with_its_program_saved(tmp_path):
    program = group_of(nodes.train_until_stop, tmp_path / "run")
    with lp.launch(
        program, "processes", log_dir=tmp_path / "logs", stop_grace_s=60.0
    ) as run:
        run.wait(TIMEOUT_S)
    one, other = run.results_of("learner")
    assert one == other
    with CheckpointStore(tmp_path / "run") as store:
        assert store.steps()[-1] == one


def test_a_group_that_does_not_stop_is_killed(running, tmp_path):
    with running(group_of(nodes.hang, tmp_path)):
        pids = [int(wait_file(tmp_path / str(rank))) for rank in (0, 1)]
    assert not any(map(is_alive, pids))


def test_where_members_may_be_on_several_hosts_they_meet_by_the_address_book(tmp_path):
    pytest.importorskip("ray")
    from replicator.launchpad_bridge.launchers.on_ray.ray_cluster import Ray

    launcher = Ray(across_hosts=True, init={"num_cpus": 4})
    with lp.launch(group_of(nodes.total, 20), launcher, log_dir=tmp_path) as run:
        run.wait(TIMEOUT_S)
    assert run.results["learner"] == (41, 2, 0)


def test_beside_threads_a_group_is_processes(tmp_path):
    program = lp.Program("grouped")
    adder = program.add_node(lp.CourierNode(nodes.Adder), label="adder")
    group_of(nodes.call, adder, program=program)
    with lp.launch(program, "threads", log_dir=tmp_path) as run:
        run.wait(TIMEOUT_S, labels=["learner"])
    assert len({*run.results["learner"], os.getpid()}) == 3
    assert (tmp_path / "learner-0.log").exists()


def test_a_killed_script_leaves_nothing_of_a_group(tmp_path):
    command = [sys.executable, "-m", "tests.multiprocess.doomed_group", tmp_path]
    with subprocess.Popen(command, cwd=ROOT) as script:
        pids = [int(wait_file(tmp_path / str(rank))) for rank in (0, 1)]
        script.send_signal(signal.SIGKILL)
    wait_dead(pids)
