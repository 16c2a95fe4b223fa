"""With a seed, nodes run one at a time and in the same order each time."""

import threading
import time

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from tests.launchpad_bridge import programs
from tests.launchpad_bridge.programs import SOON_S, counter_and, program_of


class Journal:
    """Keeps who called, in the order of the calls."""

    def __init__(self):
        self._names = []

    def note(self, name):
        self._names.append(name)

    def read(self):
        return "".join(self._names)


def note_often(journal, name):
    for _ in range(4):
        journal.note(name)


def read_at_the_end(journal):
    lp.wait_for_stop(3600.0)
    text = journal.read()
    lp.stop()
    return text


def order_of(seed):
    program = lp.Program("p")
    journal = program.add_node(lp.CourierNode(Journal), label="journal")
    for name in "abc":
        program.add_node(lp.PyNode(note_often, journal, name), label=name)
    program.add_node(lp.PyNode(read_at_the_end, journal), label="reader")
    run = lp.launch(program, lp.TestMode(seed=seed))
    run.wait(SOON_S)
    return run.results["reader"]


def test_the_same_seed_gives_the_same_order():
    assert order_of(1) == order_of(1)


def test_other_seeds_give_other_orders_of_the_same_calls():
    orders = {order_of(seed) for seed in range(8)}
    assert len(orders) > 4
    assert {"".join(sorted(order)) for order in orders} == {"aaaabbbbcccc"}


def test_waiting_takes_no_time_where_nobody_else_goes_on():
    started_s = time.monotonic()
    order_of(0)
    assert time.monotonic() - started_s < SOON_S


def run_ordered(program, **options):
    run = lp.launch(program, lp.TestMode(seed=0, **options))
    run.wait(SOON_S)
    return run


def test_values_pass_as_between_processes():
    run = run_ordered(counter_and(do="double", args=(np.ones(3),)))
    assert run.results["caller"].tolist() == [2, 2, 2]


def test_what_a_method_raises_is_raised_at_the_caller_and_names_the_edge():
    with pytest.raises(lp.NodeFailedError, match="caller -> counter") as raised:
        run_ordered(counter_and(do="fail", args=("why",)))
    assert isinstance(raised.value.__cause__, ValueError)


def test_futures_have_their_results():
    def ask(counter):
        futures = [counter.futures.add(n) for n in (1, 2)]
        lp.stop()
        return [future.result() for future in futures]

    program = program_of()
    counter = program.add_node(lp.CourierNode(programs.Counter), label="counter")
    program.add_node(lp.PyNode(ask, counter), label="asker")
    assert run_ordered(program).results["asker"] == [1, 3]


def test_the_script_may_call_nodes_too():
    program = program_of()
    counter = program.add_node(lp.CourierNode(programs.Counter), label="counter")
    with lp.launch(program, lp.TestMode(seed=0)):
        assert counter.dereference().add(5) == 5


def test_constructors_that_wait_for_each_other_are_told_so_at_once():
    program = lp.Program("embrace")
    a, b = lp.CourierNode(programs.Impatient), lp.CourierNode(programs.Impatient)
    a.configure(b.create_handle())
    b.configure(a.create_handle())
    program.add_node(a, label="a")
    program.add_node(b, label="b")
    started_s = time.monotonic()
    with pytest.raises(lp.NodeFailedError, match="constructors that call each other"):
        run_ordered(program)
    assert time.monotonic() - started_s < SOON_S


def test_inner_nodes_of_a_colocation_take_turns_of_their_own():
    program = lp.Program("p")
    journal = lp.CourierNode(Journal)
    handle = journal.create_handle()
    inner = [lp.PyNode(note_often, handle, name) for name in "ab"]
    reader = lp.PyNode(read_at_the_end, handle)
    program.add_node(
        lp.MultiThreadingColocation([journal, *inner, reader]), label="all"
    )
    text = run_ordered(program).results["all"][-1]
    assert sorted(text) == list("aaaabbbb")


def test_a_cacher_takes_turns_like_others():
    program = lp.Program("cached")
    versions = program.add_node(lp.CourierNode(programs.Versions), label="versions")
    cacher = program.add_node(lp.CacherNode(versions, 60_000, 60_000), label="cacher")
    program.add_node(lp.PyNode(programs.ask_often, cacher, 3), label="asker")
    assert run_ordered(program).results["asker"] == ["v1"] * 3


def test_a_wait_that_is_no_edge_is_told_with_its_node():
    never = threading.Event()
    program = program_of(
        stuck=lp.PyNode(never.wait, SOON_S), other=lp.PyNode(lp.wait_for_stop, 1.0)
    )
    launcher = lp.TestMode(seed=0, longest_turn_s=1.0, serialize=False)
    with pytest.raises(lp.NodeFailedError, match="got 'stuck' holding its turn"):
        lp.launch(program, launcher, stop_grace_s=0.2).wait(SOON_S)
    never.set()
