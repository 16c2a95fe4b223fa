"""Rows of the fault matrix, on processes and on Ray: 1, 3, 14, 15 and 20.

Row 4 is in `test_program_orphans`, 24 and 26 in `test_program_scripts`, 25 in
`test_program_lost_messages`.
"""

import os
import signal
import time
from collections import Counter

import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import AuthenticationError
from replicator.rpc.client.client import Client, statistics
from replicator.rpc.security.secret import Secret
from tests.multiprocess import fault_nodes as nodes
from tests.multiprocess.worker_processes import wait_file, wait_until

pytestmark = pytest.mark.slow

TIMEOUT_S = 180.0
# Ray takes seconds to start a process: its own, before the node's.
KILLS = {"processes": 20, "ray": 4}
# Each start counts as progress, so the wait before the next one does not grow.
AGAIN = lp.Restart(attempts=3, progress_s=0.01, backoff_s=0.05)


def learner_program(name="faults"):
    program = lp.Program(name)
    return program, program.add_node(lp.CourierNode(nodes.Learner), label="learner")


def kill_and_wait_again(path):
    """Kill the process that a file names, and wait until there is another."""
    pid = wait_file(path)
    os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: path.read_text() != pid, within_s=TIMEOUT_S)


def acknowledged(folder):
    """Return what actors know was inserted: (actor, number)."""
    found = set()
    for path in folder.glob("acked-*"):
        numbers = path.read_text().splitlines()
        found |= {(path.name.removeprefix("acked-"), int(number)) for number in numbers}
    return found


def test_row_1_killed_actors_come_back_and_no_acknowledged_insert_is_lost_or_double(
    running, launcher, tmp_path
):
    program, learner = learner_program()
    kills = KILLS[launcher.name]
    with program.group("actor", restart=AGAIN):
        for index in range(4):
            program.add_node(lp.PyNode(nodes.act, learner, str(tmp_path), index))
    with running(program) as run:
        client = learner.dereference()
        for index in range(4):
            wait_file(tmp_path / f"actor-{index}")
        for kill in range(kills):
            kill_and_wait_again(tmp_path / f"actor-{kill % 4}")
        steps, pause_s, _ = client.status()
        assert sum(run.workers[f"actor/{i}"].attempt for i in range(4)) == kills
        acked = acknowledged(tmp_path)
        steps_later, _, inserted_later = client.status()
    # Less than a call that waits for who was killed: those end after twice that.
    assert pause_s < nodes.CALL_S / 2
    assert steps_later >= steps > 0
    counts = Counter(map(tuple, inserted_later))
    assert max(counts.values()) == 1
    assert acked <= set(counts)


def inserts_of(folder):
    """Return how each insert ended, and how long it took."""
    return [line.split() for line in (folder / "inserts").read_text().splitlines()]


def test_row_3_a_killed_replay_comes_back_empty_and_blocks_nobody(running, tmp_path):
    program = lp.Program("replay")
    with program.group("replay", restart=AGAIN):
        replay = program.add_node(lp.CourierNode(nodes.Replay, 5, str(tmp_path)))
    program.add_node(
        lp.PyNode(nodes.insert_always, replay, str(tmp_path)), label="actor"
    )
    with running(program):
        client = replay.dereference()
        before = wait_until(lambda: client.sample()[1])
        kill_and_wait_again(tmp_path / "replay")
        size, items = client.call("sample", timeout_s=nodes.CALL_S)
        assert size == 5
        assert not set(items) & set(before)
        wait_until(lambda: client.sample()[1])
        # What is in the replay may not be acknowledged yet.
        wait_until(lambda: inserts_of(tmp_path)[-1][0] == "ok")
        calls = inserts_of(tmp_path)
    assert max(float(taken_s) for _, taken_s in calls) < nodes.CALL_S
    assert calls[0][0] == "ok"
    assert {how for how, _ in calls} <= {"ok", "ConnectionLostError"}


def fetched(folder, name):
    return len((folder / f"fetched-{name}").read_bytes().splitlines())


def test_row_14_neither_a_slow_client_nor_one_that_does_not_read_holds_up_another(
    running, tmp_path
):
    program, learner = learner_program()
    rate = 50
    for name in ("fast-1", "fast-2"):
        node = lp.PyNode(nodes.fetch_always, learner, str(tmp_path), name, rate)
        program.add_node(node, label=name)
    slow = lp.PyNode(nodes.fetch_always, learner, str(tmp_path), "slow", rate / 10)
    program.add_node(slow, label="slow")
    program.add_node(
        lp.PyNode(nodes.fetch_large, learner, str(tmp_path)), label="greedy"
    )
    with running(program):
        for name in ("fast-1", "fast-2", "slow"):
            wait_file(tmp_path / name)
        greedy = int(wait_file(tmp_path / "greedy"))
        client = learner.dereference()
        # The pools of buffers fill.
        wait_until(lambda: statistics(client).methods["large"].calls >= 32)
        os.kill(greedy, signal.SIGSTOP)
        memory_before = client.memory_bytes()
        for name in ("fast-1", "fast-2"):
            before = fetched(tmp_path, name)
            wait_until(lambda: fetched(tmp_path, name) >= before + 2 * rate)  # noqa: B023
        memory_after = client.memory_bytes()
        os.kill(greedy, signal.SIGCONT)
    assert memory_after - memory_before < 64 << 20


def test_row_15_nodes_killed_in_their_calls_leave_nothing_at_the_server(
    running, launcher, tmp_path
):
    program, learner = learner_program()
    with program.group("holder", restart=AGAIN):
        program.add_node(lp.PyNode(nodes.hold, learner, str(tmp_path)))
    with running(program):
        client = learner.dereference()
        kill_and_wait_again(tmp_path / "holder")
        threads, descriptors = client.threads()
        for _ in range(KILLS[launcher.name]):
            kill_and_wait_again(tmp_path / "holder")
        # Handlers' threads are kept for the next call, up to the size of the pool.
        wait_until(lambda: client.threads()[0] <= threads + 8)
        wait_until(lambda: client.threads()[1] <= descriptors + 2)


def test_row_15_a_thousand_clients_gone_in_their_calls_leave_nothing(running):
    program, learner = learner_program()
    vanish = lp.PyNode(nodes.vanish_often, learner, 1000)
    program.add_node(vanish, label="vanishing")
    with running(program) as run:
        client = learner.dereference()
        client.threads()
        threads, descriptors = client.threads()
        run.wait(TIMEOUT_S, labels=["vanishing"])

        def is_idle():
            held = statistics(client).methods["hold_until_cancelled"]
            return held.running == held.queued == 0

        wait_until(is_idle, within_s=nodes.CALL_S / 2)
        wait_until(lambda: client.threads()[0] <= threads + 16)
        wait_until(lambda: client.threads()[1] <= descriptors + 2)
        assert run.results["vanishing"] == 1000


def test_row_20_errors_of_all_kinds_arrive_as_what_they_are_and_the_server_lives(
    running, tmp_path
):
    program, learner = learner_program()
    program.add_node(lp.PyNode(nodes.survive, learner), label="asker")
    with running(program) as run:
        run.wait(TIMEOUT_S, labels=["asker"])
        found, lives = run.results["asker"]
    assert lives
    assert "ZeroDivisionError" in found["builtin"][0]
    assert "KeyError" in found["caused"][0]
    assert "inner" in found["caused"][2]
    assert all("RemoteError" in kinds for kinds, _, _ in found.values())
    assert max(length for _, length, _ in found.values()) < 17_000


@pytest.mark.parametrize("how", nodes.ERRORS)
def test_row_20_an_error_that_nobody_catches_fails_the_run_by_node_and_edge(
    running, tmp_path, how
):
    program, learner = learner_program()
    program.add_node(lp.PyNode(nodes.ask_to_fail, learner, how), label="asker")
    with (
        pytest.raises(lp.NodeFailedError, match="asker -> learner") as raised,
        running(program) as run,
    ):
        run.wait(TIMEOUT_S)
    assert raised.value.node == "asker"
    assert len(str(raised.value)) < 40_000


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (lp.CourierNode(nodes.BrokenConstructor), "raised OSError: no such device"),
        (lp.PyNode(nodes.break_stop_handler), "raised LookupError: broken handler"),
    ],
    ids=["constructor", "stop handler"],
)
def test_row_20_what_a_constructor_or_a_stop_handler_raises_is_not_lost(
    running, tmp_path, node, words
):
    program = lp.Program("broken")
    program.add_node(node, label="broken")
    with (
        pytest.raises(lp.NodeFailedError, match=f"`broken` {words}"),
        running(program) as run,
    ):
        run.wait(TIMEOUT_S)


def test_a_node_killed_in_a_call_fails_the_run_and_not_its_caller(running):
    program, learner = learner_program()
    for number in range(3):
        program.add_node(
            lp.PyNode(nodes.hold_for_long, learner), label=f"held-{number}"
        )
    program.add_node(lp.PyNode(nodes.ask_to_die, learner), label="asker")
    began_s = time.monotonic()
    with (
        pytest.raises(lp.NodeFailedError, match="`learner` was killed by") as told,
        running(program) as run,
    ):
        run.wait(TIMEOUT_S)
    assert told.value.node == "learner"
    assert time.monotonic() - began_s < TIMEOUT_S / 2


def test_who_has_another_secret_is_refused_by_name_and_the_program_goes_on(running):
    program, learner = learner_program()
    with running(program):
        client = learner.dereference()
        assert client.parameters() >= 0
        with (
            Client(client.address, secret=Secret.generate()) as stranger,
            pytest.raises(
                AuthenticationError,
                match=r"unix:.*refused this process: its secret is another one",
            ),
        ):
            stranger.parameters()
        assert client.parameters() >= 0
