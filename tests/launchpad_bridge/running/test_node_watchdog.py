"""A node that hangs is ended; one that has ended is left alone."""

import threading

from replicator.launchpad_bridge.running.node_watchdog import fail_node


def test_a_node_that_has_ended_is_not_interrupted_and_no_program_stops():
    over, stops = threading.Event(), []
    over.set()
    fail_node(
        threading.current_thread(),
        over,
        "no progress",
        node="learner",
        stop_program=lambda: stops.append("program"),
        others=list,
    )
    assert stops == []
