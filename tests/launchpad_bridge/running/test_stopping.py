import pickle
import threading

import pytest

import replicator.launchpad_bridge as lp
from replicator.launchpad_bridge.running.stop_event import StopEvent, mirrored
from tests.launchpad_bridge.programs import program_of


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lp.stop, "got none"),
        (lp.wait_for_stop, "only available from the Launchpad's program node"),
        (lp.stop_event, "only available from the Launchpad's program node"),
        (lp.context.get_context, "Launchpad context was not instantiated"),
    ],
)
def test_outside_of_a_program_there_is_nothing_to_stop(ask, text):
    with pytest.raises(RuntimeError, match=text):
        ask()


def test_the_script_stops_its_only_program():
    run = lp.launch(program_of(a=lp.PyNode(lp.wait_for_stop, 20)))
    lp.stop()
    run.wait(60)


def test_the_script_has_to_say_which_of_two_programs():
    programs = [program_of(a=lp.PyNode(lp.wait_for_stop, 20)) for _ in range(2)]
    refused = pytest.raises(lp.LaunchError, match="must know which program is meant")
    with lp.launch(programs[0]), lp.launch(programs[1]), refused:
        lp.stop()


def test_a_stopper_can_be_pickled_and_stops_the_program_that_it_is_called_in():
    stopper = pickle.loads(pickle.dumps(lp.make_program_stopper("local_mt")))
    programs = [
        program_of(
            a=lp.PyNode(lp.wait_for_stop, 20), b=lp.PyNode(lp.wait_for_stop, 20)
        ),
        program_of(a=lp.PyNode(lp.wait_for_stop, 20), b=lp.PyNode(stopper)),
    ]
    with lp.launch(programs[0]) as other:
        lp.launch(programs[1]).wait(60)
        assert not other.is_over


def test_waiting_for_the_stop_tells_whether_it_came():
    def work():
        return lp.wait_for_stop(0), lp.stop(), lp.wait_for_stop(20), lp.wait_for_stop(0)

    run = lp.launch(program_of(a=lp.PyNode(work)))
    run.wait(60)
    assert run.results["a"] == (False, None, True, True)


def test_handlers_are_called_once_and_in_both_ways():
    called = []

    def plain():
        called.append("plain")

    def like_a_signals(signum, frame):
        called.append("signal")

    def dropped():
        called.append("dropped")

    def work():
        for handler in (plain, like_a_signals, dropped):
            lp.register_stop_handler(handler)
        lp.unregister_stop_handler(dropped)
        lp.stop()
        lp.wait_for_stop(20)

    lp.launch(program_of(a=lp.PyNode(work))).wait(60)
    assert sorted(called) == ["plain", "signal"]


def test_a_handler_that_is_registered_after_the_stop_is_called_at_once():
    called = []

    def work():
        lp.stop()
        lp.wait_for_stop(20)
        lp.register_stop_handler(lambda: called.append(1))

    lp.launch(program_of(a=lp.PyNode(work))).wait(60)
    assert called == [1]


def test_a_handler_is_not_called_when_its_node_ends_before_the_stop():
    called = []

    def work():
        lp.register_stop_handler(lambda: called.append(1))

    with lp.launch(
        program_of(a=lp.PyNode(work), b=lp.PyNode(lp.wait_for_stop, 20))
    ) as r:
        r.wait(60, labels=["a"])
    assert called == []


def test_what_a_handler_raises_fails_its_node():
    def work():
        lp.register_stop_handler(lambda: 1 / 0)
        lp.wait_for_stop(20)

    run = lp.launch(program_of(a=lp.PyNode(work), b=lp.PyNode(lp.stop)))
    with pytest.raises(lp.NodeFailedError, match="`a` raised ZeroDivisionError"):
        run.wait(60)


def test_handlers_of_the_script_are_called_when_its_program_stops():
    called = []
    lp.register_stop_handler(lambda: called.append(1))
    with lp.launch(program_of(a=lp.PyNode(lp.wait_for_stop, 20))) as run:
        pass
    with lp.launch(program_of(a=lp.PyNode(lp.wait_for_stop, 20))):
        pass
    assert run.is_over
    assert called == [1]


def test_an_event_calls_back_when_it_is_set_and_at_once_if_it_is():
    event, called = StopEvent(), []
    event.when_set(lambda: called.append(1))
    event.when_set(lambda: called.append(2))()  # cancelled
    event.set()
    event.set()
    event.when_set(lambda: called.append(3))
    assert called == [1, 3]


def test_an_event_of_another_kind_is_followed():
    event, over, called = threading.Event(), threading.Event(), threading.Event()
    mirrored(event, over=over).when_set(called.set)
    event.set()
    assert called.wait(60)
    over.set()
