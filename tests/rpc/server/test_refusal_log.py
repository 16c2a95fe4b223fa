"""A flood of strangers fills no log."""

import logging

from replicator.errors import AuthenticationError
from replicator.rpc.server.refusal_log import RefusalLog

LOG = logging.getLogger("replicator.rpc.server.test")


def test_refusals_are_told_once_a_second_and_counted(caplog):
    now_s = 100.0
    refusals = RefusalLog("'counter'", LOG, clock=lambda: now_s)
    for number in range(1000):
        refusals.warn(AuthenticationError(f"number {number}"))
    assert caplog.messages == ["'counter' refused a client: number 0"]
    now_s = 101.0
    refusals.warn(AuthenticationError("the last"))
    assert caplog.messages[1:] == [
        "'counter' refused a client: the last (999 others were refused before it)"
    ]


def test_refusals_that_are_far_apart_are_each_told(caplog):
    now_s = 0.0
    refusals = RefusalLog("'counter'", LOG, clock=lambda: now_s)
    for second in range(5):
        now_s = 2.0 * second
        refusals.warn(AuthenticationError("no"))
    assert caplog.messages == ["'counter' refused a client: no"] * 5
