"""The machine: what a bad number leads to, word by word."""

import dataclasses
import json
import re

import pytest

from replicator.errors import ArgumentError
from replicator.training.nonfinite.policy import (
    BadNumber,
    History,
    Reaction,
    RecoveryPolicy,
    decide,
    history_from_json,
    resume_at,
)

NAN = BadNumber(kind="nonfinite", step=7, leaf="loss", found="nan", call=6)
SPIKE = BadNumber(kind="spike", step=7, leaf="loss", found="9 where 2 ± 1 is usual")

FLIPPED = BadNumber(
    kind="mismatch", step=7, leaf="user/w", found="other bits on replica 3", call=6
)


def after(events, **policy):
    """Return the history and the last outcome after some events."""
    history, outcome = History(), Reaction()
    for event in events:
        history, outcome = decide(RecoveryPolicy(**policy), history, event)
    return history, outcome


def test_by_default_a_nan_stops_the_run_with_leaf_and_step_named():
    _, outcome = after([NAN])
    assert outcome == Reaction(
        stop="`loss` must be finite, got nan at step 7. Look at the batch and the "
        'learning rate, or pass `on_nonfinite="ignore"`.'
    )


def test_copies_that_differ_stop_the_run_whatever_nan_does():
    _, outcome = after([FLIPPED], on_nonfinite="ignore")
    assert outcome == Reaction(
        stop="`user/w` must be equal on all devices that hold it, got other bits on "
        "replica 3 at step 7. Start again without that device: a saved run goes on "
        "from its last checkpoint."
    )


def test_copies_that_differ_lead_back_and_leave_no_batch_out():
    history, outcome = after([FLIPPED], on_mismatch="rollback")
    assert outcome == Reaction(goes_back=True)
    assert history.left_out == ()


def test_a_device_that_flips_bits_again_and_again_ends_the_run():
    policy = RecoveryPolicy(on_mismatch="rollback", max_rollbacks=2)
    history, outcomes = History(), []
    for _ in range(3):
        history, outcome = resume_at(policy, history, FLIPPED, start_step=4)
        outcomes.append(outcome.stop)
    assert outcomes[:2] == [None, None]
    assert "at step 7, after 2 rollbacks without a new checkpoint. Start" in outcomes[2]


def test_ignore_does_nothing():
    assert after([NAN], on_nonfinite="ignore") == (History(), Reaction())


def test_a_skipped_update_is_noted_and_counted():
    history, outcome = after([NAN], on_nonfinite="skip")
    assert outcome == Reaction(note="skipped")
    assert (history.skips_in_a_row, history.last_skip) == (1, 7)


def test_skips_with_a_good_step_between_them_are_no_row():
    events = [dataclasses.replace(NAN, step=step) for step in (1, 3, 4)]
    assert after(events, on_nonfinite="skip")[0].skips_in_a_row == 2


def test_too_many_skips_in_a_row_stop_the_run():
    events = [dataclasses.replace(NAN, step=step) for step in (1, 2, 3)]
    _, outcome = after(events, on_nonfinite="skip", max_skips=3)
    assert outcome.note == "skipped"
    assert "got nan at step 3, the 3th update in a row" in outcome.stop


def test_a_rollback_leaves_out_the_batch_and_gives_up_what_came_after():
    history, outcome = after([NAN], on_nonfinite="rollback")
    assert outcome == Reaction(goes_back=True)
    assert history.left_out == (6,)


def gone_back(*rounds):
    """Go back twice at most: (batch, where the run goes on) for each time."""
    policy = RecoveryPolicy(on_nonfinite="rollback", max_rollbacks=2)
    history, outcome = History(), Reaction()
    for call, start_step in rounds:
        event = dataclasses.replace(NAN, call=call)
        history, _ = decide(policy, history, event)
        history, outcome = resume_at(policy, history, event, start_step=start_step)
    return history, outcome


def test_rollbacks_without_a_new_checkpoint_are_bounded():
    history, outcome = gone_back((6, 4), (7, 4), (8, 4))
    assert (outcome.note, outcome.goes_back) == (None, False)
    assert "at step 7, after 2 rollbacks without a new checkpoint." in outcome.stop
    assert history.left_out == (6, 7)  # to look at it, the last is read once more


def test_a_new_checkpoint_lets_the_run_go_back_again():
    history, outcome = gone_back((6, 4), (7, 4), (8, 6), (9, 6))
    assert outcome == Reaction()
    assert (history.rollbacks, history.back_to) == (2, 6)


@pytest.mark.parametrize("call", [None, 6])
def test_no_rollback_without_a_batch_to_leave_out(call):
    first = NAN
    _, outcome = after(
        [first, dataclasses.replace(NAN, call=call)], on_nonfinite="rollback"
    )
    assert (outcome.note, outcome.goes_back) == (None, False)
    assert "and its batch is not known" in outcome.stop


def test_a_spike_is_logged_by_default():
    _, outcome = after([SPIKE])
    assert outcome == Reaction(note="spike")


def test_a_spike_can_stop_the_run():
    _, outcome = after([SPIKE], on_spike="raise")
    assert outcome == Reaction(
        note="spike",
        stop="`loss` must stay in its range, got 9 where 2 ± 1 is usual at step 7. "
        "Look at the batch and the learning rate, or pass "
        '`Spikes(action="log")`.',
    )


def test_a_spike_can_take_the_run_back_whatever_is_done_about_nan():
    event = dataclasses.replace(SPIKE, call=6)
    history, outcome = after([event], on_spike="rollback", on_nonfinite="raise")
    assert outcome == Reaction(note="spike", goes_back=True)
    assert history.left_out == (6,)


def test_history_survives_json():
    history, _ = after([NAN], on_nonfinite="rollback")
    assert (
        history_from_json(json.loads(json.dumps(dataclasses.asdict(history))))
        == history
    )


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
        RecoveryPolicy(**arguments)
