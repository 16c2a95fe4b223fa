"""A child answers, or how it ended is told."""

import signal

from replicator.distributed.child import ChildEnd, ask_child


class Stops:
    """It stops the process that reads it."""

    def __reduce__(self):
        return signal.pause, ()


def ask(order, limit_s=60.0, **environ):
    child = "tests.distributed.answering"
    return ask_child(child, order, limit_s=limit_s, **environ)


def test_a_child_answers_with_what_it_writes():
    assert ask("hello") == b"hello"


def test_a_child_has_what_is_added_to_its_environment():
    assert ask("ADDED", ADDED="yes") == b"yes"


def test_a_child_is_no_process_of_the_group_of_its_parent(monkeypatch):
    variable = "REPLICATOR_COORDINATOR_BIND"
    monkeypatch.setenv(variable, "host")
    assert ask(variable) == variable.encode()


def test_a_child_that_aborts_ends_with_the_signal_and_its_last_words():
    found = ask("abort")

    assert isinstance(found, ChildEnd)
    assert not found.is_late
    assert found.why == "it was killed by SIGABRT: the compiler has given up"


def test_a_child_that_exits_without_an_answer_ends_with_its_code():
    assert ask("exit") == ChildEnd(is_late=False, why="it exited with code 3: ")


def test_a_child_that_takes_too_long_is_ended():
    assert ask("wait", limit_s=0.5) == ChildEnd(
        is_late=True, why="not done within 0.5 s"
    )


def test_a_child_that_does_not_read_all_of_its_order_is_ended():
    large = bytes(1 << 20)  # more than a pipe holds

    assert ask([Stops(), large], limit_s=0.5).is_late
