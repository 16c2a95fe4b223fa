"""A script ends with a status that says how its programs ended."""

import pytest

from tests.launchpad_bridge.scripts import run

pytestmark = pytest.mark.slow


def test_a_script_that_only_launches_goes_on_until_its_program_has_ended():
    status, out, _ = run("""
        import threading
        end = threading.Event()
        def work():
            end.wait()
            print("worked", flush=True)
        lp.launch(program_of(lp.PyNode(work)))
        print("end of script", flush=True)
        end.set()
    """)
    assert status == 0
    assert out.split("\n")[:2] == ["end of script", "worked"]


def test_a_failure_that_nobody_waited_for_ends_the_script_with_its_traceback():
    status, out, err = run("""
        import atexit
        atexit.register(print, "closed in order")
        lp.launch(program_of(bad=lp.PyNode(fail), other=lp.PyNode(wait_for_stop)))
    """)
    assert status == 1
    assert "NodeFailedError: `bad` raised ValueError: oh no" in err
    assert "in fail" in err
    assert "closed in order" in out


@pytest.mark.parametrize(
    "see",
    [
        "run.wait(raise_error=False)",
        "run.wait_end(); assert run.failure.node == 'node'",
        "try: run.wait()\n        except lp.NodeFailedError: pass",
    ],
)
def test_a_failure_that_was_seen_is_the_scripts_own_business(see):
    status, _, err = run(f"""
        run = lp.launch(program_of(lp.PyNode(fail)))
        {see}
    """)
    assert status == 0, err


def test_a_failure_that_is_raised_ends_the_script():
    status, _, err = run("lp.launch(program_of(lp.PyNode(fail))).wait()")
    assert status == 1
    assert err.count("NodeFailedError: `node` raised ValueError") == 1


def test_a_script_that_fails_stops_its_program():
    status, out, err = run("""
        def work():
            lp.wait_for_stop()
            print("stopped", flush=True)
        lp.launch(program_of(lp.PyNode(work)))
        raise KeyError("own")
    """)
    assert status == 1
    assert "KeyError: 'own'" in err
    assert out == "stopped\n"


def test_pools_of_threads_work_while_the_script_waits_at_its_end():
    status, out, err = run("""
        from concurrent.futures import ThreadPoolExecutor
        def work():
            time.sleep(0.3)
            with ThreadPoolExecutor(2) as pool:
                print(sum(pool.map(int, "123")), flush=True)
        lp.launch(program_of(lp.PyNode(work)))
    """)
    assert (status, out) == (0, "6\n"), err


def test_a_child_of_multiprocessing_waits_and_tells_too():
    status, out, _ = run("""
        import multiprocessing
        def child():
            lp.launch(program_of(lp.PyNode(fail)))
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        print(process.exitcode)
    """)
    assert out == "1\n"
    assert status == 0


def test_a_child_launches_whatever_a_thread_of_its_parent_held_at_the_fork():
    status, out, err = run("""
        import multiprocessing, threading
        from replicator.launchpad_bridge.running import exit_status
        lp.launch(program_of(lp.PyNode(print, "of the parent"))).wait()
        held, forked = threading.Event(), threading.Event()
        def hold():
            with exit_status._LOCK:
                held.set()
                forked.wait()
        threading.Thread(target=hold).start()
        held.wait()
        def child():
            lp.launch(program_of(lp.PyNode(print, "of the child"))).wait()
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        forked.set()
        process.join(60)
        print(process.exitcode)
        process.kill()
    """)
    assert (status, out) == (0, "of the parent\nof the child\n0\n"), err


def test_a_thread_that_is_left_behind_does_not_keep_the_process():
    status, _, err = run("""
        program = program_of(
            deaf=lp.PyNode(time.sleep, 1000), stopping=lp.PyNode(lp.stop)
        )
        lp.launch(program, stop_grace_s=0.1)
    """)
    assert status == 0
    assert "killing `deaf`" in err
