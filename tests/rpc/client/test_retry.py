import math

import numpy as np
import pytest

from replicator.rpc.client.retry import (
    Again,
    GiveUp,
    OutOfTime,
    TryOutcome,
    decide,
    delay_s,
)


def decision(outcome, **changes):
    asked = {
        "attempt": 1,
        "remaining_s": 10.0,
        "is_idempotent": False,
        "wait_for_ready": True,
        "random": lambda: 1.0,
    }
    return decide(outcome, **(asked | changes))


@pytest.mark.parametrize("outcome", [TryOutcome.UNREACHABLE, TryOutcome.REFUSED])
def test_a_call_that_did_not_run_is_tried_again_while_it_may_wait(outcome):
    assert isinstance(decision(outcome), Again)
    assert isinstance(decision(outcome, wait_for_ready=False), GiveUp)


@pytest.mark.parametrize("outcome", [TryOutcome.LOST, TryOutcome.UNKNOWN])
@pytest.mark.parametrize("wait_for_ready", [True, False])
def test_a_call_that_may_have_run_is_tried_again_only_if_idempotent(
    outcome, wait_for_ready
):
    asked = {"wait_for_ready": wait_for_ready}
    assert isinstance(decision(outcome, **asked), GiveUp)
    assert isinstance(decision(outcome, is_idempotent=True, **asked), Again)


def test_a_link_that_was_dead_unnoticed_is_made_again_once_without_waiting_for_ready():
    asked = {"wait_for_ready": False}
    assert isinstance(decision(TryOutcome.REFUSED, attempt=0, **asked), Again)
    assert isinstance(decision(TryOutcome.REFUSED, attempt=1, **asked), GiveUp)


@pytest.mark.parametrize("outcome", TryOutcome)
def test_nothing_is_tried_after_the_deadline(outcome):
    after = decision(outcome, remaining_s=0.0, is_idempotent=True)
    assert isinstance(after, OutOfTime)


def test_a_late_call_is_never_tried_again():
    assert isinstance(decision(TryOutcome.LATE, is_idempotent=True), OutOfTime)


def test_each_delay_is_about_a_tenth_of_what_was_waited_before_it():
    delays = [delay_s(attempt, lambda: 1.0) for attempt in range(48)]
    waited_s = np.cumsum(delays)
    shares = np.array(delays[1:]) / waited_s[:-1]
    assert delays[0] == 0.01
    assert shares[15:] == pytest.approx(0.1, rel=0.3)


def test_no_delay_is_longer_than_a_second():
    assert delay_s(49, lambda: 1.0) == 1.0
    assert delay_s(10_000, lambda: 1.0) == 1.0


def test_jitter_takes_up_to_half_of_a_delay():
    assert delay_s(0, lambda: 0.0) == 0.005


def test_no_delay_goes_past_the_deadline():
    assert decision(TryOutcome.UNREACHABLE, attempt=40, remaining_s=0.1) == Again(0.1)


def test_without_a_deadline_it_goes_on():
    assert isinstance(decision(TryOutcome.UNREACHABLE, remaining_s=math.inf), Again)
