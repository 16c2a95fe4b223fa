"""Islands that are lost: their slices go on elsewhere, what lived there is named."""

import contextlib
import os
import select
import signal

import jax
import numpy as np
import pytest

from replicator import controller
from replicator.errors import ArgumentError, IslandLostError

ONES = np.ones(2, np.float32)
LIMIT_S = 120


def double(x):
    return x * 2


@pytest.fixture
def servers():
    """Two islands of a device each in this process: the first may be stopped."""
    with contextlib.ExitStack() as stack:
        made = [
            controller.IslandServer("unix:", devices=jax.devices()[:1]) for _ in "ab"
        ]
        for each in made:
            stack.enter_context(each)
        yield made


def lose(server, op):
    """Stop a server; return what an op that runs there raises."""
    server.__exit__()
    while True:  # what is called before it is known to be lost may also go on elsewhere
        try:
            op(ONES).result(LIMIT_S)
        except IslandLostError as error:
            return error
        if op.slice.island != "island0":
            return None


def test_a_slice_goes_to_a_spare_island_which_no_slice_had(servers):
    first, spare = (each.address for each in servers)
    with controller.connect([first], spares=[spare], lost_after_s=300) as pw:
        op = pw.fn(double, pw.slice(1))
        assert [pw.slice(1).island for _ in range(2)] == ["island0", "island0"]
        with pytest.raises(ArgumentError, match="an island by its name"):
            pw.slice(1, island="island1")
        lose(servers[0], op)
        assert np.asarray(op(ONES)).tolist() == [2.0, 2.0]
        assert {op.slice.island, pw.slice(1).island} == {"island1"}


def test_a_slice_goes_to_another_island_and_futures_there_remain(servers):
    with controller.connect([e.address for e in servers], lost_after_s=300) as pw:
        op = pw.fn(double, pw.slice(1, island="island0"))
        there = pw.fn(double, pw.slice(1, island="island1"))
        state = op(ONES)
        copy, behind = pw.copy(state, there.slice), pw.program(lambda x: there(op(x)))
        assert np.asarray(copy).tolist() == [2.0, 2.0]
        lose(servers[0], op)
        assert np.asarray(op(copy)).tolist() == [4.0, 4.0]
        assert np.asarray(behind(ONES)).tolist() == [4.0, 4.0]
        assert op.slice.island == "island1"


def test_a_future_that_was_lost_is_refused_by_name(servers):
    with controller.connect([e.address for e in servers], lost_after_s=300) as pw:
        op = pw.fn(double, pw.slice(1, island="island0"))
        there = pw.fn(double, pw.slice(1, island="island1"))
        future, read = op(ONES), op(ONES)
        assert np.asarray(read).tolist() == [2.0, 2.0]
        lose(servers[0], op)
        for use in (future.result, lambda: there(future), lambda: op(future)):
            with pytest.raises(IslandLostError, match="was lost with island0") as found:
                use()
            assert found.value.island == "island0"
        assert np.asarray(read).tolist() == [2.0, 2.0]  # it was read before


def test_a_slice_that_nobody_has_devices_for_is_refused_by_name(servers):
    with controller.connect([servers[0].address], lost_after_s=300) as pw:
        op = pw.fn(double, pw.slice(1))
        servers[0].__exit__()
        with pytest.raises(IslandLostError, match="island0"):
            op(ONES).result(LIMIT_S)
        with pytest.raises(IslandLostError, match="no other island has 1 devices of"):
            op(ONES)
        with pytest.raises(ArgumentError, match="must have an island, got none"):
            pw.slice(1)


def process_id(x):
    def call(x):
        return np.full_like(x, os.getpid())

    return jax.pure_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def kill(pid):
    ended = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([ended], [], [], LIMIT_S)[0]
    os.close(ended)


@pytest.mark.slow
@pytest.mark.parametrize("spares", [1, 0], ids=["spare", "cold"])
def test_a_killed_island_is_replaced_and_training_goes_on_bit_by_bit(spares):
    with controller.start(islands=2, devices=1, spares=spares, lost_after_s=300) as pw:
        on, safe = (pw.slice(1, island=f"island{n}") for n in range(2))
        step = pw.fn(lambda state: jax.numpy.sin(state) + state, on)
        bystander = pw.fn(double, safe)
        undisturbed = state = pw.put(ONES, on)
        for _ in range(4):
            undisturbed = step(undisturbed)
        wanted = np.asarray(undisturbed)
        for _ in range(2):
            state = step(state)
        kept = pw.copy(state, safe)
        kept.result(LIMIT_S)
        value = bystander(ONES)
        kill(int(pw.fn(process_id, on)(ONES)[0]))
        with pytest.raises(IslandLostError, match="SIGKILL"):
            state.result(LIMIT_S)
        state = pw.copy(kept, on)
        for _ in range(2):
            state = step(state)
        assert np.asarray(state).tolist() == wanted.tolist()
        assert on.island == "island2"
        assert np.asarray(bystander(value)).tolist() == [4.0, 4.0]
