"""Where the output of a program's nodes is kept, and for how long."""

import shutil

import pytest

import replicator.launchpad_bridge as lp

pytestmark = pytest.mark.slow

TIMEOUT_S = 180.0


def say():
    print("said by a node")


def say_and_fail():
    say()
    raise ValueError("a bug")


def run_of(function, **options):
    program = lp.Program("logged")
    program.add_node(lp.PyNode(function), label="node")
    return lp.launch(program, lp.Processes(preload=(), **options))


def test_a_temporary_folder_goes_with_a_run_that_ends_well(capfd):
    run = run_of(say)
    run.wait(TIMEOUT_S)
    assert "node | said by a node" in capfd.readouterr().out
    assert not run.plan.logs.exists()


def test_it_stays_where_a_node_failed_and_the_failure_names_it():
    run = run_of(say_and_fail)
    with pytest.raises(lp.NodeFailedError) as told:
        run.wait(TIMEOUT_S)
    log = run.plan.logs / "node.log"
    assert str(log) in str(told.value)
    assert "said by a node" in log.read_text()
    shutil.rmtree(run.plan.folder)


def test_it_stays_where_it_holds_all_that_is_known():
    run = run_of(say, terminal="output_to_files")
    run.wait(TIMEOUT_S)
    assert (run.plan.logs / "node.log").read_text() == "said by a node\n"
    shutil.rmtree(run.plan.folder)


def test_a_program_without_processes_leaves_no_folder():
    program = lp.Program("logged")
    program.add_node(lp.PyNode(say), label="node")
    run = lp.launch(program, "threads")
    run.wait(TIMEOUT_S)
    assert not run.plan.logs.exists()


def test_a_folder_of_the_users_own_stays(tmp_path):
    program = lp.Program("logged")
    program.add_node(lp.PyNode(say), label="node")
    lp.launch(program, "processes", log_dir=tmp_path).wait(TIMEOUT_S)
    assert (tmp_path / "node.log").read_text() == "said by a node\n"


def test_logs_lie_where_nobody_else_could_have_made_them():
    run = run_of(say, terminal="output_to_files")
    run.wait(TIMEOUT_S)
    assert run.plan.logs.parent == run.plan.folder
    assert run.plan.folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in run.plan.folder.iterdir()] == ["logs"]
    shutil.rmtree(run.plan.folder)
