"""Workers in processes of their own: how they start, stop, and end. Real processes."""

import os
import signal
import time

import jax
import numpy as np
import pytest

from replicator.errors import LaunchError, NodeFailedError
from replicator.launchpad_bridge.launchers.processes import Processes
from replicator.launchpad_bridge.protocols import Resources
from replicator.launchpad_bridge.running.results import Unsendable
from tests.multiprocess import worker_nodes as nodes
from tests.multiprocess.worker_processes import (
    is_alive,
    opened,
    wait_dead,
)

pytestmark = pytest.mark.slow

SPAWN = Processes(start="spawn", terminal="output_to_files")


def end_of(tmp_path, function, **options):
    with opened(tmp_path, a=function, **options) as run:
        run.start("a")
        return run.end("a")


def test_a_worker_returns_its_result(tmp_path):
    with opened(tmp_path, a=nodes.add, b=nodes.give({"x": [1, None]})) as run:
        run.start_all()
        assert run.end("b").result == {"x": [1, None]}
        assert run.end("a").outcome == "returned"
        np.testing.assert_array_equal(
            run.end("a").result["array"], np.ones((300, 1000))
        )


def test_a_result_that_cannot_travel_says_why_and_fails_nothing(tmp_path):
    end = end_of(tmp_path, nodes.give_thread)
    assert end.outcome == "returned"
    assert isinstance(end.result, Unsendable)
    assert "Thread" in end.result.reason


def test_what_a_worker_raises_is_raised_with_its_name_traceback_and_words(tmp_path):
    end = end_of(tmp_path, nodes.fail)
    assert end.outcome == "raised"
    assert isinstance(end.error, NodeFailedError)
    assert end.error.node == "a"
    assert str(end.error).startswith("`a` raised ValueError: a bug (process ")
    assert "    before it fails" in str(end.error).splitlines()
    assert isinstance(end.error.__cause__, ValueError)
    assert "in fail" in end.error.__cause__.remote_traceback
    assert end.error.__notes__ == ["On the edge tested -> other"]


DEATHS = {
    "kill": (nodes.kill_itself(signal.SIGKILL), "was killed by SIGKILL"),
    "segv": (nodes.kill_itself(signal.SIGSEGV), "was killed by SIGSEGV"),
    "exit": (nodes.leave_hard(3), "exited with code 3 without a report"),
    "late": (nodes.crash_at_exit, "returned, but then was killed by SIGABRT"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_death_is_told_by_what_the_kernel_knows(tmp_path, death):
    function, words = DEATHS[death]
    end = end_of(tmp_path, function)
    assert end.outcome == "died"
    assert words in str(end.error).splitlines()[0]


def test_a_death_comes_with_the_last_lines_and_the_stacks_of_a_crash(tmp_path):
    text = str(end_of(tmp_path, nodes.kill_itself(signal.SIGSEGV)).error)
    assert "    last words" in text
    assert "Segmentation fault" in text
    assert "in kill_itself" in text or "in run" in text


@pytest.mark.parametrize("how", ["close", "descriptor", "none"])
def test_a_node_that_closes_its_output_goes_on_to_its_result(tmp_path, how):
    assert end_of(tmp_path, nodes.close_output(how)).result == how


@pytest.mark.parametrize("how", ["close", "descriptor", "none"])
def test_what_a_node_raises_is_told_though_it_has_closed_its_output(tmp_path, how):
    end = end_of(tmp_path, nodes.close_output(how, then=nodes.fail_in_silence))
    assert "raised ValueError: a bug" in str(end.error)


def test_leaving_by_sys_exit_is_an_end_like_returning(tmp_path):
    assert end_of(tmp_path, nodes.leave(0)).outcome == "returned"


def test_leaving_with_another_code_is_a_failure(tmp_path):
    end = end_of(tmp_path, nodes.leave(3))
    assert end.outcome == "raised"
    assert "raised SystemExit: 3" in str(end.error)


def test_a_death_is_noticed_at_once(tmp_path):
    """By a look once in some seconds, each but the first would wait for the next."""
    names = "abcdefgh"
    sleepers = {name: nodes.tell_and_sleep(tmp_path / name) for name in names}
    took_s = []
    with opened(tmp_path, **sleepers) as run:
        run.start_all()
        pids = {name: int(run.told(tmp_path / name)) for name in names}
        for name, pid in pids.items():
            started_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            assert run.end(name).outcome == "died"
            took_s.append(time.monotonic() - started_s)
    # A few ms; more on a busy machine, but hardly for each of seven.
    assert min(took_s[1:]) < 1.0, took_s


def test_a_worker_that_is_asked_stops_and_still_returns(tmp_path):
    with opened(tmp_path, a=nodes.tell_and_wait(tmp_path / "pid")) as run:
        worker = run.start("a")
        run.told(tmp_path / "pid")
        worker.stop()
        worker.stop()
        assert run.end("a").outcome == "stopped"
        assert run.end("a").result == "a of tested was stopped"


def test_a_stop_that_is_asked_before_the_worker_runs_is_not_lost(tmp_path):
    with opened(tmp_path, a=nodes.wait_for_stop) as run:
        run.start("a").stop()
        assert run.end("a").outcome == "stopped"


def test_sigterm_asks_a_worker_to_stop_which_is_then_preempted(tmp_path):
    with opened(tmp_path, a=nodes.tell_and_wait(tmp_path / "pid")) as run:
        run.start("a")
        os.kill(int(run.told(tmp_path / "pid")), signal.SIGTERM)
        assert run.end("a").outcome == "preempted"
        assert run.end("a").result == "a of tested was stopped"
        assert run.asked == ["a"]


def test_a_worker_that_its_launcher_asked_first_is_not_preempted(tmp_path):
    with opened(tmp_path, a=nodes.tell_and_stop_late(tmp_path / "pid")) as run:
        worker = run.start("a")
        pid = int(run.told(tmp_path / "pid"))
        worker.stop()
        run.told(tmp_path / "pid.asked")
        os.kill(pid, signal.SIGTERM)
        assert run.end("a").outcome == "stopped"
        assert run.asked == []


def test_a_child_that_a_node_forks_and_terminates_ends_and_stops_no_node(tmp_path):
    with opened(tmp_path, a=nodes.terminate_child) as run:
        run.start("a")
        assert run.end("a").result == -signal.SIGTERM
        assert run.end("a").outcome == "returned"
        assert run.asked == []


def test_a_second_sigterm_ends_a_worker_that_does_not_stop(tmp_path):
    with opened(tmp_path, a=nodes.tell_and_sleep(tmp_path / "pid")) as run:
        run.start("a")
        pid = int(run.told(tmp_path / "pid"))
        os.kill(pid, signal.SIGTERM)
        run.wait_asked()  # two signals at once may be one
        os.kill(pid, signal.SIGTERM)
        assert "was killed by SIGTERM" in str(run.end("a").error)


def test_a_worker_that_heeds_nothing_can_be_killed(tmp_path):
    with opened(tmp_path, a=nodes.ignore_sigterm(tmp_path / "pid")) as run:
        worker = run.start("a")
        run.told(tmp_path / "pid")
        worker.kill()
        assert run.end("a").outcome == "died"
        assert "was killed by its launcher" in str(run.end("a").error)
        worker.kill()
        worker.stop()


def test_a_worker_may_be_killed_before_its_fork_server_is_ready(tmp_path):
    with opened(tmp_path, a=nodes.sleep()) as run:
        run.start("a").kill()
        assert run.end("a").outcome == "died"


@pytest.mark.parametrize("launcher", [None, SPAWN], ids=["forked", "spawned"])
@pytest.mark.parametrize("way", ["killed", "died", "returned"])
def test_what_a_worker_has_started_goes_with_it(tmp_path, way, launcher):
    then = {"died": nodes.leave_hard(1), "killed": nodes.sleep()}
    function = nodes.have_children(
        tmp_path / "pids", then=then.get(way, nodes.give(None))
    )
    with opened(tmp_path, launcher=launcher, a=function, b=nodes.sleep()) as run:
        worker = run.start("a")
        run.start("b")
        pids = [int(pid) for pid in run.told(tmp_path / "pids").split()]
        if way == "killed":
            worker.kill()
        run.end("a")
        wait_dead(pids)


def test_what_a_living_worker_has_started_lives(tmp_path):
    function = nodes.have_children(tmp_path / "pids", then=nodes.wait_for_stop)
    with opened(tmp_path, a=function, b=nodes.leave_hard(1)) as run:
        run.start("a")
        pids = [int(pid) for pid in run.told(tmp_path / "pids").split()]
        run.start("b")
        run.end("b")
        assert all(map(is_alive, pids))


def test_closing_ends_whatever_still_runs(tmp_path):
    with opened(tmp_path, a=nodes.tell_and_sleep(tmp_path / "pid")) as run:
        run.start("a")
        pid = int(run.told(tmp_path / "pid"))
    wait_dead([pid])
    assert run.end("a").outcome == "died"
    with pytest.raises(LaunchError, match="the run is over"):
        run.start("a", attempt=1)


def test_a_worker_may_ask_for_the_stop_of_all(tmp_path):
    with opened(tmp_path, a=nodes.ask_for_stop) as run:
        worker = run.start("a")
        assert run.wait_asked() == "a"
        worker.stop()
        assert run.end("a").outcome == "stopped"


def test_a_worker_is_started_again_with_its_log_continued(tmp_path):
    with opened(tmp_path, a=nodes.fail) as run:
        run.start("a")
        run.end("a")
        run.start("a", attempt=1)
        end = run.end("a", attempt=1)
        assert "attempt 1)" in str(end.error).splitlines()[0]
        assert str(end.error).count("before it fails") == 1
        assert run.log("a").count("before it fails") == 2
        assert "--- attempt 1" in run.log("a")


def test_forks_do_not_draw_the_same_numbers(tmp_path):
    with opened(tmp_path, a=nodes.draw, b=nodes.draw) as run:
        run.start_all()
        a, b = run.end("a").result, run.end("b").result
        assert a[0] != b[0]
        assert a[1] != b[1]


@pytest.mark.parametrize("launcher", [None, SPAWN], ids=["forked", "spawned"])
def test_workers_find_arguments_folder_and_one_other_thread(tmp_path, launcher):
    import sys

    argv, folder, threads = end_of(
        tmp_path, nodes.surroundings, launcher=launcher
    ).result
    assert (argv, folder, threads) == (sys.argv, os.getcwd(), 2)


def test_workers_do_not_load_what_only_shows_a_program(tmp_path):
    assert end_of(tmp_path, nodes.loaded_dashboard, launcher=SPAWN).result == []


@pytest.mark.parametrize("launcher", [None, SPAWN], ids=["forked", "spawned"])
def test_settings_of_jax_hold_in_workers(tmp_path, launcher):
    with jax.enable_x64(True):
        pass  # a context of a thread is none of the program's settings
    jax.config.update("jax_enable_x64", True)
    try:
        end = end_of(tmp_path, nodes.default_dtype, launcher=launcher)
    finally:
        jax.config.update("jax_enable_x64", False)
    assert end.result == "float64"


@pytest.mark.parametrize("launcher", [None, SPAWN], ids=["forked", "spawned"])
def test_variables_of_a_group_are_its_own_and_there_before_imports(tmp_path, launcher):
    resources = {
        "a": Resources(env={"TESTED": "1", "JAX_ENABLE_X64": "1"}),
        "b": Resources(env={"TESTED": "2"}),
    }
    functions = {"a": nodes.default_dtype, "b": nodes.environment("TESTED", "HOME")}
    with opened(tmp_path, resources, launcher=launcher, **functions) as run:
        run.start_all()
        assert run.end("a").result == "float64"
        assert run.end("b").result == ["2", os.environ.get("HOME")]


def test_hidden_accelerators_are_hidden_from_jax_as_well(tmp_path):
    names = nodes.environment("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")
    with opened(tmp_path, {"a": Resources(gpus=0)}, a=names) as run:
        run.start("a")
        assert run.end("a").result == ["", "cpu"]


def test_threads_that_keep_a_worker_are_named_in_its_log(tmp_path):
    with opened(tmp_path, a=nodes.leave_a_thread) as run:
        run.start("a")
        assert run.end("a").outcome == "returned"
        assert "its threads still run: slow one" in run.log("a")


def test_output_is_kept_and_shown_with_a_label(tmp_path, capfd):
    launcher = Processes(preload=())
    with opened(tmp_path, launcher=launcher, a=nodes.print_lines) as run:
        run.start("a")
        run.end("a")
    lines = [f"line {number}" for number in range(1000)] + ["to the other"]
    assert run.log("a").splitlines() == lines
    shown = capfd.readouterr().out.splitlines()
    assert shown == [f"a | {line}" for line in lines]


def test_logs_can_be_read_by_their_owner_only(tmp_path):
    with opened(tmp_path, a=nodes.print_lines) as run:
        run.start("a")
        run.end("a")
    modes = {path.stat().st_mode & 0o777 for path in run.plan.logs.iterdir()}
    assert modes == {0o600}


def test_recipes_are_gone_after_the_run(tmp_path):
    with opened(tmp_path, a=nodes.give(1)) as run:
        run.start("a")
        run.end("a")
    assert list(run.plan.folder.iterdir()) == []


def test_a_module_that_starts_a_thread_has_each_worker_start_afresh(tmp_path, caplog):
    launcher = Processes(
        preload=("tests.multiprocess.starts_a_thread",), terminal="output_to_files"
    )
    end = end_of(tmp_path, nodes.own_interpreter, launcher=launcher)
    assert "worker_process" in " ".join(end.result)
    (record,) = caplog.records
    assert "importing `tests.multiprocess.starts_a_thread` starts a thread" in (
        record.getMessage()
    )


def test_a_module_that_starts_jax_has_each_worker_start_afresh(tmp_path, caplog):
    launcher = Processes(
        preload=("tests.multiprocess.starts_jax",), terminal="output_to_files"
    )
    end = end_of(tmp_path, nodes.own_interpreter, launcher=launcher)
    assert end.outcome == "returned"
    assert "JAX's backend" in caplog.text


def test_a_module_that_cannot_be_imported_is_left_to_those_who_need_it(tmp_path):
    launcher = Processes(
        preload=("no_such_module_anywhere",), terminal="output_to_files"
    )
    assert end_of(tmp_path, nodes.give(1), launcher=launcher).result == 1


def test_more_than_the_machine_has_is_refused_by_name(tmp_path):
    with pytest.raises(LaunchError, match="`cpus` of `a` must be there"):
        end_of(tmp_path, nodes.give(1), resources={"a": Resources(cpus=10_000)})
