import threading

import pytest

import replicator.launchpad_bridge as lp


def colocation(*functions, **options):
    return lp.MultiThreadingColocation([lp.PyNode(f) for f in functions], **options)


def test_results_are_those_of_the_inner_nodes_in_their_order():
    assert colocation(lambda: 1, lambda: 2).run() == [1, 2]


def test_the_first_to_end_ends_it_if_so_asked():
    may_go, done = threading.Event(), threading.Event()

    def slow():
        may_go.wait(60)
        done.set()

    node = colocation(lambda: 1, slow, return_on_first_completed=True)
    assert node.run() == [1, None]
    assert not done.is_set()
    may_go.set()
    assert done.wait(60)


def test_an_error_of_one_stops_the_others_and_names_it():
    stopped = []

    def fail():
        raise RuntimeError("Foo")

    with pytest.raises(RuntimeError, match="Foo") as raised:
        colocation(fail, lambda: stopped.append(lp.wait_for_stop(20))).run()
    assert stopped == [True]
    assert "inner node <PyNode" in raised.value.__notes__[0]


def test_a_stop_reaches_inner_nodes_however_deep():
    seen = []

    def wait():
        seen.append(lp.wait_for_stop(20))

    inner = colocation(wait, lp.stop)
    outer = lp.MultiThreadingColocation([lp.PyNode(wait), inner])
    lp.launch(lp.make_program(outer)).wait(60)
    assert seen == [True, True]


def test_stop_handlers_of_inner_nodes_are_called():
    called = []

    def handle():
        lp.register_stop_handler(lambda: called.append(1))
        lp.wait_for_stop(20)

    lp.launch(lp.make_program(colocation(handle, lp.stop))).wait(60)
    assert called == [1]


def test_addresses_of_inner_nodes_get_names_of_their_own():
    nodes = [lp.CourierNode(dict), lp.CourierNode(dict), lp.PyNode(print)]
    nodes[2].allocate_address(lp.Address())
    colocation = lp.MultiThreadingColocation(nodes)
    assert [a.name for a in colocation.addresses] == ["courier0", "courier1", "lp0"]


def test_what_is_no_py_node_is_refused():
    with pytest.raises(ValueError, match="MultiThreadingColocation only works with"):
        lp.MultiThreadingColocation([object()])


def test_a_colocation_of_nothing_is_refused():
    with pytest.raises(ValueError, match="requires at least one node"):
        lp.MultiThreadingColocation([]).run()
