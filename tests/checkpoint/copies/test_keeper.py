"""A keeper holds the last whole copies of each process, within its bound."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from replicator import rpc
from replicator.checkpoint.copies.keeper import (
    LIMITS,
    TLS_VARIABLE,
    VARIABLE,
    Keeper,
    copy_name,
    keeper_client,
    serve_keeper,
)
from replicator.distributed.piece_transfer import (
    Piece,
    PieceTree,
    as_bytes,
    take_pieces,
)
from replicator.errors import (
    ArgumentError,
    AuthenticationError,
    CallTimeoutError,
    DecodeError,
)

LONG_S = 60.0
SIZE = 1 << 16


def arrays_at(step):
    values = np.random.default_rng(step).standard_normal(SIZE // 8)
    return {"w": values[:100], "x": values[100:]}


def tree_of(arrays, step):
    pieces = tuple(Piece.of(name, array) for name, array in arrays.items())
    return PieceTree(about={"step": step}, pieces=pieces)


def hand_over(keeper, step, *, process=0, line="a", num_bytes=SIZE, last=-1):
    """Hand over a copy to a keeper or its client; return the bytes it lacks."""
    arrays = arrays_at(step)
    if missing := keeper.begin(line, process, step, num_bytes, last):
        return missing
    for array in arrays.values():
        keeper.add(line, process, step, [np.frombuffer(as_bytes(array), np.uint8)])
    keeper.complete(line, process, step, tree_of(arrays, step).as_json())
    return 0


@pytest.fixture
def keeper():
    made = Keeper(8 * SIZE)
    made.take_over("run", "", "a")
    return made


def test_a_copy_comes_back_bit_for_bit_after_its_process_was_killed(tmp_path):
    with serve_keeper(tmp_path) as variables:
        killed = subprocess.run(
            [sys.executable, "-m", __name__],
            env={**os.environ, **variables},
            cwd=Path(__file__).parents[3],
            timeout=LONG_S,
        )
        assert killed.returncode == -signal.SIGKILL
        with rpc.Client(variables[VARIABLE], limits=LIMITS) as client:
            assert [tuple(each) for each in client.held("a")] == [(0, 10)]
            name = copy_name("a", 0, 10)
            tree, taken = take_pieces(client, name, most_bytes=SIZE, timeout_s=LONG_S)
    assert tree == tree_of(arrays_at(10), 10)
    for array, wanted in zip(taken.values(), arrays_at(10).values(), strict=True):
        assert array.tobytes() == wanted.tobytes()


def test_the_last_copy_stays_until_the_next_is_whole(keeper):
    for step in (5, 10, 15):
        hand_over(keeper, step, last=step - 5)
    assert keeper.held("a") == [(0, 10), (0, 15)]
    keeper.begin("a", 0, 20, SIZE, 15)
    assert keeper.held("a") == [(0, 15)]


def test_a_step_that_all_have_stays_where_one_process_fails_to_hand_over(keeper):
    for process in (0, 1):
        hand_over(keeper, 5, process=process)
    hand_over(keeper, 10, last=5)
    keeper.begin("a", 1, 10, SIZE, 5)  # and no more
    for process in (0, 1):
        keeper.begin("a", process, 15, SIZE, 5)
    assert keeper.held("a") == [(0, 5), (1, 5)]


def test_a_process_that_hands_over_elsewhere_has_no_copies_left(keeper):
    for process in range(4):
        hand_over(keeper, 5, process=process)
    for step in (10, 15):
        hand_over(keeper, step, last=step - 5)
    assert keeper.held("a") == [(0, 10), (0, 15)]
    for process in (1, 2, 4):
        assert hand_over(keeper, 20, process=process, last=15) == 0


def test_a_copy_that_is_read_is_not_written_over(tmp_path):
    with serve_keeper(tmp_path) as variables:
        address = variables[VARIABLE]
        with (
            rpc.Client(address, limits=LIMITS) as writer,
            rpc.Client(address, limits=LIMITS) as reader,
        ):
            writer.take_over("run", "", "a")
            hand_over(writer, 5)
            parts = [(0, 0, 800), (1, 0, SIZE - 800)]
            read = reader.call("read_pieces", [copy_name("a", 0, 5), parts])
            for step in (10, 15, 20, 25):
                hand_over(writer, step)
            assert b"".join(part.tobytes() for part in read) == b"".join(
                array.tobytes() for array in arrays_at(5).values()
            )


def test_two_copies_of_each_process_must_fit(keeper):
    for process in range(4):
        assert hand_over(keeper, 5, process=process) == 0
    assert hand_over(keeper, 5, process=4) == 2 * SIZE
    assert keeper.held("a") == [(process, 5) for process in range(4)]
    keeper.drop("a", above=-1)
    assert hand_over(keeper, 5, process=4) == 0


def test_more_bytes_than_announced_are_refused(keeper):
    with pytest.raises(ValueError, match="800 bytes of a copy of 100"):
        hand_over(keeper, 5, num_bytes=100)
    assert keeper.held("a") == []


def test_a_copy_that_is_not_described_rightly_is_refused(keeper):
    keeper.begin("a", 0, 5, SIZE, -1)
    with pytest.raises(ValueError, match="of other sizes"):
        keeper.complete("a", 0, 5, tree_of(arrays_at(5), 5).as_json())
    with pytest.raises(DecodeError):
        keeper.complete("a", 0, 5, {"about": None})
    assert keeper.held("a") == []


def test_a_run_that_goes_back_leaves_no_copy_of_later_steps(keeper):
    for step in (5, 10):
        hand_over(keeper, step, last=step - 5)
    keeper.drop("a", above=7)
    assert keeper.held("a") == [(0, 5)]
    keeper.begin("a", 0, 15, SIZE, 5)
    keeper.drop("a", above=7)
    assert keeper.held("a") == [(0, 5)]
    with pytest.raises(LookupError, match="no copy of step 15"):
        keeper.add("a", 0, 15, [])


def test_copies_go_to_the_next_owner_of_the_directory_and_to_no_other(keeper):
    hand_over(keeper, 5)
    keeper.take_over("run", "a", "b")
    keeper.take_over("run", "a", "b")  # each process of the host calls it
    assert keeper.held("b") == [(0, 5)]
    with pytest.raises(LookupError, match="has taken the run's directory over"):
        keeper.held("a")
    keeper.take_over("other", "", "x")
    keeper.take_over("run", "", "c")  # the directory was made anew
    assert keeper.held("c") == keeper.held("x") == []


def test_a_copy_that_is_gone_is_not_offered(tmp_path):
    with (
        serve_keeper(tmp_path) as variables,
        rpc.Client(variables[VARIABLE], limits=LIMITS) as client,
    ):
        client.take_over("run", "", "a")
        with pytest.raises(ArgumentError, match="got 'a/0/5'"):
            take_pieces(client, "a/0/5", most_bytes=SIZE, timeout_s=LONG_S)


def test_a_keeper_of_another_host_is_reached_by_the_runs_secret(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    rpc.Secret.generate().write(tmp_path / "secret")
    monkeypatch.setenv("REPLICATOR_RPC_SECRET_FILE", str(tmp_path / "secret"))
    with serve_keeper(tmp_path, host="127.0.0.1") as variables:
        monkeypatch.setenv(TLS_VARIABLE, variables[TLS_VARIABLE])
        *_, beyond = variables[VARIABLE].split(",")
        with keeper_client(beyond, timeout_s=LONG_S) as client:
            client.take_over("run", "", "a")
            hand_over(client, 5)
            name = copy_name("a", 0, 5)
            _, taken = take_pieces(client, name, most_bytes=SIZE, timeout_s=LONG_S)
        other = rpc.Secret.generate()
        with (
            rpc.Client(beyond, secret=other, insecure=True) as stranger,
            pytest.raises((AuthenticationError, CallTimeoutError)),
        ):
            stranger.call("held", ["a"], timeout_s=2.0)
    assert b"".join(each.tobytes() for each in taken.values()) == b"".join(
        array.tobytes() for array in arrays_at(5).values()
    )


def test_a_keeper_for_other_hosts_needs_the_runs_secret(tmp_path, monkeypatch):
    monkeypatch.delenv("REPLICATOR_RPC_SECRET_FILE", raising=False)
    with (
        pytest.raises(ArgumentError, match="`copies_host` must be in a run with a sec"),
        serve_keeper(tmp_path, host="127.0.0.1"),
    ):
        pytest.fail("it was served")


if __name__ == "__main__":
    with rpc.Client(os.environ[VARIABLE], limits=LIMITS) as own:
        own.take_over("run", "", "a")
        for number in (5, 10):
            hand_over(own, number, last=number - 5)
        own.begin("a", 0, 15, SIZE, 10)
        os.kill(os.getpid(), signal.SIGKILL)
