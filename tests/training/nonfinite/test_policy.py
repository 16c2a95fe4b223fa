"""The machine: what a bad number leads to, word by word."""

import dataclasses
import json
import re

import pytest

from replicator.errors import ArgumentError
from replicator.training.nonfinite.policy import (
    BadNumber,
    GoBack,
    History,
    Note,
    Policy,
    Stop,
    come_back,
    decide,
    history_from_json,
)

NAN = BadNumber(kind="nonfinite", step=7, leaf="loss", found="nan", call=6)
SPIKE = BadNumber(kind="spike", step=7, leaf="loss", found="9 where 2 ± 1 is usual")


def after(events, **policy):
    """Return the history and the last actions after some events."""
    history, actions = History(), ()
    for event in events:
        history, actions = decide(Policy(**policy), history, event)
    return history, actions


def test_by_default_a_nan_stops_the_run_with_leaf_and_step_named():
    _, (stop,) = after([NAN])
    assert isinstance(stop, Stop)
    assert stop.message == (
        "`loss` must be finite, got nan at step 7. Look at the batch and the learning "
        'rate, or pass `on_nonfinite="ignore"`.'
    )


def test_ignore_does_nothing():
    assert after([NAN], on_nonfinite="ignore") == (History(), ())


def test_a_skipped_update_is_noted_and_counted():
    history, actions = after([NAN], on_nonfinite="skip")
    assert actions == (Note(kind="skipped", step=7, leaf="loss", found="nan"),)
    assert (history.skips_in_a_row, history.last_skip) == (1, 7)


def test_skips_with_a_good_step_between_them_are_no_row():
    events = [dataclasses.replace(NAN, step=step) for step in (1, 3, 4)]
    assert after(events, on_nonfinite="skip")[0].skips_in_a_row == 2


def test_too_many_skips_in_a_row_stop_the_run():
    events = [dataclasses.replace(NAN, step=step) for step in (1, 2, 3)]
    _, (_, stop) = after(events, on_nonfinite="skip", max_skips=3)
    assert isinstance(stop, Stop)
    assert "got nan at step 3, the 3th update in a row" in stop.message


def test_a_rollback_leaves_out_the_batch_and_gives_up_what_came_after():
    history, actions = after([NAN], on_nonfinite="rollback")
    assert actions == (GoBack(before_step=7, leave_out=6),)
    assert history.left_out == (6,)


def gone_back(*rounds):
    """Go back twice at most: (batch, where the run goes on) for each time."""
    policy = Policy(on_nonfinite="rollback", max_rollbacks=2)
    history, actions = History(), ()
    for call, start_step in rounds:
        event = dataclasses.replace(NAN, call=call)
        history, _ = decide(policy, history, event)
        history, actions = come_back(policy, history, event, start_step=start_step)
    return history, actions


def test_rollbacks_without_a_new_checkpoint_are_bounded():
    history, (stop,) = gone_back((6, 4), (7, 4), (8, 4))
    assert isinstance(stop, Stop)
    assert "at step 7, after 2 rollbacks without a new checkpoint." in stop.message
    assert history.left_out == (6, 7)  # to look at it, the last is read once more


def test_a_new_checkpoint_lets_the_run_go_back_again():
    history, actions = gone_back((6, 4), (7, 4), (8, 6), (9, 6))
    assert actions == ()
    assert (history.rollbacks, history.back_to) == (2, 6)


@pytest.mark.parametrize("call", [None, 6])
def test_no_rollback_without_a_batch_to_leave_out(call):
    first = NAN
    _, (stop,) = after(
        [first, dataclasses.replace(NAN, call=call)], on_nonfinite="rollback"
    )
    assert isinstance(stop, Stop)


def test_a_spike_is_logged_by_default():
    _, actions = after([SPIKE])
    assert [type(action) for action in actions] == [Note]


def test_a_spike_can_stop_the_run():
    _, (_, stop) = after([SPIKE], on_spike="raise")
    assert isinstance(stop, Stop)
    assert stop.message == (
        "`loss` must stay in its range, got 9 where 2 ± 1 is usual at step 7. Look at "
        'the batch and the learning rate, or pass `Spikes(action="log")`.'
    )


def test_a_spike_can_take_the_run_back_whatever_is_done_about_nan():
    event = dataclasses.replace(SPIKE, call=6)
    _, (_, back) = after([event], on_spike="rollback", on_nonfinite="raise")
    assert back == GoBack(before_step=7, leave_out=6)


def test_history_survives_json():
    history, _ = after([NAN], on_nonfinite="rollback")
    assert history_from_json(json.loads(json.dumps(history.as_json()))) == history


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_nonfinite": "stop"}, "`on_nonfinite` must be one of 'raise', 'ignore'"),
        ({"on_spike": "skip"}, "`on_spike` must be one of 'log', 'raise', 'rollback'"),
        ({"max_rollbacks": 0}, "`max_rollbacks` must be at least 1, got 0."),
    ],
)
def test_a_policy_breaks_no_rule(arguments, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        Policy(**arguments)
