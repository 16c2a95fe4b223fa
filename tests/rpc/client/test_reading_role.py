import threading
import time

import pytest

from replicator.rpc.client.reading_role import Inbox, ReadingRole


def test_one_at_a_time_has_the_role():
    role = ReadingRole()
    assert role.try_take(False)
    assert not role.try_take(False)
    role.leave()
    assert role.try_take(False)


def test_nobody_follows_while_the_role_is_free():
    role = ReadingRole()
    started_s = time.monotonic()
    role.follow(Inbox(), 100.0)
    assert time.monotonic() - started_s < 50


def test_who_follows_waits_no_longer_than_it_said():
    role = ReadingRole()
    role.try_take(False)
    role.follow(Inbox(), 0.01)


def test_who_holds_the_role_knows_it():
    role = ReadingRole()
    role.try_take(False)
    assert not role.is_mine()
    role.own()
    assert role.is_mine()
    role.leave()
    assert not role.is_mine()


@pytest.mark.parametrize("threads", [2, 5])
def test_no_waking_is_lost(threads):
    """Each item is for one thread; whoever reads hands it over. Nobody may starve."""
    role, rounds = ReadingRole(), 300
    stream = iter([number for _ in range(rounds) for number in range(threads)])
    inboxes = [Inbox() for _ in range(threads)]
    got = [0] * threads
    longest_s = [0.0] * threads

    def read_for(own, wanted):
        while got[own] < wanted:
            if not role.try_take(False):
                started_s = time.monotonic()
                role.follow(inboxes[own], 60.0)
                longest_s[own] = max(longest_s[own], time.monotonic() - started_s)
                continue
            while got[own] < wanted:
                whose = next(stream)
                got[whose] += 1
                inboxes[whose].put(None)
            role.leave()
        role.pass_on()

    def caller(own):
        for wanted in range(1, rounds + 1):
            read_for(own, wanted)

    workers = [threading.Thread(target=caller, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert got == [rounds] * threads
    assert max(longest_s) < 50.0, "somebody was woken by the time alone"
