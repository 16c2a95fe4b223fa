"""Islands of several processes: values, moves, reads, and how they are lost."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from replicator import controller
from replicator.controller.islands.group import GroupIsland, _together
from replicator.controller.islands.protocol import (
    Drop,
    IslandDevice,
    IslandMessage,
    OrderList,
    Put,
)
from replicator.controller.islands.wire import ArrayParts
from replicator.distributed.processes.ports import free_port
from replicator.errors import ArgumentError, IslandLostError, OpFailedError
from tests.controller.test_process_islands import called, process_id

LIMIT_S = 120
ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)
CUT, WHOLE = P("devices"), P()


@pytest.fixture(scope="module")
def pw():
    """Two islands of two processes each, with a device in each."""
    with controller.start(
        islands=2, devices=2, processes=2, lost_after_s=300
    ) as opened:
        yield opened


def on(pw, island, n=2):
    return pw.slice(n, island=f"island{island}")


def summed(slice_):
    """Return a function that sums rows over the devices of a slice."""
    return jax.shard_map(
        lambda x: jax.lax.psum(x.sum(), "devices"),
        mesh=slice_.mesh,
        in_specs=CUT,
        out_specs=WHOLE,
    )


@pytest.mark.slow
def test_a_dataflow_over_two_islands_has_the_values_of_figure_2(pw):
    a = pw.fn(lambda x: x * 2.0, on(pw, 0), in_specs=CUT, out_specs=CUT)
    b = pw.fn(lambda x: x + 1.0, on(pw, 1))
    c = pw.fn(lambda x: x / 2.0, on(pw, 1), out_specs=CUT)

    @pw.program
    def f(v):
        x = a(v)
        return b(x), a(c(x))

    y, z = f(np.array([1.0, 2.0], np.float32))
    assert y.result(LIMIT_S).tolist() == [3.0, 5.0]
    assert z.result(LIMIT_S).tolist() == [2.0, 4.0]


@pytest.mark.slow
def test_a_function_of_the_host_is_refused_where_it_would_run_twice(pw):
    op = pw.host(np.sin, on(pw, 0), jax.ShapeDtypeStruct((2,), np.float32))
    with pytest.raises(ArgumentError, match=r"`sin` of .* must run on an island"):
        op(np.ones(2, np.float32))


@pytest.mark.slow
def test_a_sum_is_over_the_devices_of_all_processes(pw):
    at = on(pw, 1)
    found = pw.fn(summed(at), at, in_specs=CUT)(ROWS).result(LIMIT_S)
    assert float(found) == ROWS.sum()


def steps(pw, slice_):
    """Return the bits after ten steps that mix all rows."""
    total = summed(slice_)
    step = pw.fn(
        lambda x: jax.numpy.sin(x) + total(x),
        slice_,
        in_specs=CUT,
        out_specs=CUT,
        donate=(0,),
    )
    x = pw.put(ROWS, slice_, CUT)
    for _ in range(10):
        x = step(x)
    return np.asarray(x.result(LIMIT_S)).tobytes()


@pytest.mark.slow
def test_bits_are_those_of_an_island_of_this_process(pw):
    with controller.local(islands=1, devices=2) as here:
        assert steps(pw, on(pw, 0)) == steps(here, here.slice(2))


@pytest.mark.slow
def test_a_slice_may_be_of_one_process_alone(pw):
    ones = [pw.slice(1, island="island0") for _ in range(2)]
    assert {each.places for each in ones} == {(0,), (1,)}
    there = [pw.fn(lambda x: x + 1, each) for each in ones]
    found = pw.program(lambda x: there[1](there[0](x)))(ROWS)
    np.testing.assert_array_equal(found.result(LIMIT_S), ROWS + 2)


@pytest.mark.slow
def test_keys_and_values_of_several_processes_are_read_in_one_piece(pw):
    at = on(pw, 0)
    cut = pw.fn(lambda x: (x, x.T), at, out_specs=(CUT, P(None, "devices")))
    keys = pw.fn(lambda key: jax.random.split(key, 4), at, out_specs=CUT)
    (rows, columns), key = cut(ROWS), jax.random.key(3)
    found = controller.read([rows, columns, keys(key)])
    assert np.asarray(found[0]).tolist() == ROWS.tolist()
    assert np.asarray(found[1]).tolist() == ROWS.T.tolist()
    wanted = jax.random.key_data(jax.random.split(key, 4))
    np.testing.assert_array_equal(jax.random.key_data(found[2]), wanted)


@contextlib.contextmanager
def served_group():
    """Serve an island by two processes of a group of their own; yield addresses."""
    at = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tests.controller.island_member", at]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        processes = []
        for number in "01":
            process = subprocess.Popen(
                [*command, number], env={**os.environ, "JAX_PLATFORMS": "cpu"}, **pipes
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield [process.stdout.readline().strip() for process in processes]


@pytest.mark.slow
def test_values_move_between_a_users_group_and_an_island_of_one_process():
    with (
        served_group() as addresses,
        controller.IslandServer("unix:", devices=jax.devices()[:2]) as one,
    ):
        with pytest.raises(ArgumentError, match=r"those of all processes"):
            controller.connect([addresses[1], one.address])
        # In any order.
        with controller.connect([addresses[::-1], one.address], lost_after_s=300) as pw:
            group, single = on(pw, 0), on(pw, 1)
            for spec, there in [(CUT, CUT), (WHOLE, CUT), (CUT, WHOLE), (WHOLE, WHOLE)]:
                out = pw.fn(lambda x: x + 1, group, in_specs=spec, out_specs=spec)
                at = pw.fn(lambda x: x * 2, single, in_specs=there, out_specs=there)
                found = pw.program(lambda x, at=at, out=out: out(at(out(x))))(ROWS)
                np.testing.assert_array_equal(found.result(LIMIT_S), (ROWS + 1) * 2 + 1)


def pids_of(pw, slice_):
    """Return the numbers of the processes that have the devices of a slice."""
    ask = jax.shard_map(
        called(process_id), mesh=slice_.mesh, in_specs=CUT, out_specs=CUT
    )
    found = pw.fn(lambda x: ask(x), slice_, in_specs=CUT, out_specs=CUT)
    return [int(pid) for pid in found(np.ones(2)).result(LIMIT_S)]


# The last two lose an island each: no other follows that needs it.


@pytest.mark.slow
def test_an_island_is_lost_with_one_of_its_processes_and_none_stays(pw):
    add = [pw.fn(lambda x: x + 1, on(pw, n), out_specs=CUT) for n in range(2)]
    kept, pids = add[0](ROWS), pids_of(pw, add[0].slice)
    ends = [os.pidfd_open(pid) for pid in pids]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(IslandLostError, match="process 1, which was killed") as told:
        kept.result(LIMIT_S)
    assert told.value.island == "island0"
    for end in ends:
        assert select.select([end], [], [], LIMIT_S)[0]
        os.close(end)
    np.testing.assert_array_equal(add[1](ROWS).result(LIMIT_S), ROWS + 1)


def fail_on_the_second(x):
    if x.ravel()[0]:
        raise ValueError("no such luck")
    return np.asarray(x)


@pytest.mark.slow
def test_an_op_that_fails_in_one_process_alone_is_the_end_of_its_island(pw):
    at = on(pw, 1)
    bad = jax.shard_map(
        called(fail_on_the_second), mesh=at.mesh, in_specs=CUT, out_specs=CUT
    )
    op = pw.fn(lambda x: bad(x), at, in_specs=CUT, out_specs=CUT)
    kept, end = pw.put(ROWS, at), os.pidfd_open(pids_of(pw, at)[0])
    with pytest.raises(OpFailedError, match="no such luck"):
        op(np.arange(2)).result(LIMIT_S)
    assert select.select([end], [], [], LIMIT_S)[0]
    os.close(end)
    with pytest.raises(IslandLostError, match="failed in some processes alone"):
        kept.result(LIMIT_S)


class Member:
    """A process of an island that does what a test says."""

    def __init__(self, number, hear, lost):
        self.number, self.hear, self.lost = number, hear, lost
        self.taken, self.dropped, self.ends = [], [], []

    def submit(self, message):
        self.taken.append(message)

    def drop(self, key):
        self.dropped.append(key)

    def give_up(self, error):
        self.ends.append(str(error))
        self.lost("island0", error)


BOTH = Put(output=0, places=(0, 1), layout=None)
SECOND = Put(output=1, places=(1,), layout=None)


def group():
    """Return an island of two processes that was sent a run, and its news."""
    members, news = [], []

    def member(*args):
        members.append(Member(*args))
        return members[-1]

    devices = [
        IslandDevice(kind="cpu", memory_bytes=1, device=None, process=n)
        for n in range(2)
    ]
    island = GroupIsland(
        "island0",
        devices,
        member,
        report=lambda *report: news.append(report[:3]),
        lost=lambda *lost: news.append(lost),
    )
    orders = OrderList(orders=[BOTH, SECOND])
    island.submit(
        IslandMessage(
            number=0, run=7, order_list=orders, inputs={}, values={0: "x", 1: "y"}
        )
    )
    return island, members, news


def test_each_process_gets_the_orders_of_its_devices_and_their_values_alone():
    _, (first, second), _ = group()
    (one,), (two,) = first.taken, second.taken
    assert (one.order_list.orders, one.values) == ([BOTH], {0: "x"})
    assert (two.order_list.orders, two.values) == ([BOTH, SECOND], {0: "x", 1: "y"})


def test_a_value_is_reported_when_all_that_have_a_part_of_it_have_said_so():
    _, (first, second), news = group()
    second.hear(7, [0], None)
    second.hear(7, [1], None)
    assert news == [(7, [1], None)]
    first.hear(7, [0], None)
    assert news[1:] == [(7, [0], None)]


def test_a_failure_is_reported_once_and_at_once():
    _, (first, second), news = group()
    errors = OpFailedError("a"), OpFailedError("b")
    first.hear(7, [0], errors[0])
    second.hear(7, [0], errors[1])
    assert news == [(7, [0], errors[0])]
    assert not first.ends


def failed_on(island, kind=OpFailedError):
    error = kind("a")
    error.island = island
    return error


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_island_whose_processes_differ_is_given_up(order):
    _, (first, second), news = group()
    for number in order:
        error = failed_on("island0") if number else None
        (first, second)[number].hear(7, [0], error)
    assert "in some processes alone" in first.ends[0]
    assert len(second.ends) == 1
    assert news[-1][0] == "island0"


def test_an_island_of_which_one_process_got_what_a_lost_one_sent_stays():
    _, (first, second), news = group()
    error = failed_on("island1", IslandLostError)
    first.hear(7, [0], None)
    second.hear(7, [0], error)
    assert news == [(7, [0], error)]
    assert not first.ends


def test_an_island_that_finds_a_process_of_its_own_lost_is_given_up():
    _, (first, second), _ = group()
    second.hear(7, [0], failed_on("island0", IslandLostError))
    assert first.ends
    assert second.ends


def test_all_processes_are_given_up_with_the_first_and_it_is_told_once():
    _, (first, second), news = group()
    error = OpFailedError("a")
    second.lost("island0", error)
    assert news == [("island0", error)]
    second.hear(7, [0], error)
    first.hear(7, [0], None)  # which is no difference now
    assert (len(first.ends), len(second.ends)) == (1, 0)


class Fleeting(dict):
    """Forgets what it was asked for, as when another thread donates it."""

    def get(self, key, default=None):
        return self.pop(key, default)


def test_a_value_that_an_op_is_given_meanwhile_is_read_from_all_or_none():
    island, members, _ = group()
    island._holders = Fleeting(island._holders)
    parts = [ArrayParts(shape=(2,), parts=[((n,), np.full(1, n))]) for n in range(2)]
    for member, part in zip(members, parts, strict=True):
        member.read = lambda keys, part=part: [part for _ in keys]
    assert island.read([(7, 0)])[0].tolist() == [0, 1]


def test_who_is_interrupted_waits_for_no_process():
    over, waited = threading.Event(), []

    def call(number):
        if number == 0:
            raise KeyboardInterrupt
        waited.append(over.wait(LIMIT_S))

    with pytest.raises(KeyboardInterrupt):
        _together([0, 1], call)
    assert not waited
    over.set()


def test_where_a_value_is_that_an_op_donates_is_forgotten():
    island, _, _ = group()
    orders = OrderList(orders=[Drop(values=(3,))])
    island.submit(
        IslandMessage(number=1, run=8, order_list=orders, inputs={3: (7, 0)}, values={})
    )
    assert list(island._holders) == [(7, 1)]


def test_a_value_is_forgotten_where_a_part_of_it_is():
    island, (first, second), _ = group()
    island.drop((7, 1))
    island.drop((7, 0))
    assert (first.dropped, second.dropped) == ([(7, 0)], [(7, 1), (7, 0)])
