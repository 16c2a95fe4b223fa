import pytest

from replicator.rpc.server.draining import Phase, Stop, begin, decide


def after(stop, *, now_s, calls_left):
    return decide(stop, now_s=now_s, calls_left=calls_left, cancel_s=1.0)


DRAINING = begin(until_s=10.0)


def test_a_stop_begins_by_draining():
    assert Stop(Phase.DRAINING, 10.0) == DRAINING


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.CANCELLING])
def test_a_server_without_calls_has_stopped(phase):
    stop = after(Stop(phase, 10.0), now_s=0.0, calls_left=0)
    assert stop.phase is Phase.STOPPED


def test_calls_have_their_time():
    assert after(DRAINING, now_s=9.9, calls_left=1) == DRAINING


def test_calls_that_take_longer_are_cancelled():
    cancelling = after(DRAINING, now_s=10.0, calls_left=1)
    assert cancelling == Stop(Phase.CANCELLING, 11.0)
    assert after(cancelling, now_s=10.9, calls_left=1) == cancelling


def test_calls_that_do_not_notice_are_left():
    stop = after(Stop(Phase.CANCELLING, 11.0), now_s=11.0, calls_left=1)
    assert stop.phase is Phase.STOPPED


@pytest.mark.parametrize("phase", [Phase.SERVING, Phase.STOPPED])
def test_nothing_follows_by_itself_from_serving_or_having_stopped(phase):
    stop = Stop(phase, 0.0)
    assert after(stop, now_s=99.0, calls_left=3) is stop
