"""Which last words say that another one failed first, or that it would come again."""

import pytest

from replicator.distributed.processes.symptoms import comes_again, is_symptom


@pytest.mark.parametrize(
    "line",
    [
        b"ValueError: UNKNOWN: Gloo all-reduce failed: [x] Connection closed by peer",
        b"F1121 client.h:80] Terminating process because the JAX distributed service "
        b"detected fatal errors. This most likely indicates",
        b"DistributedError: `n` must be agreed on by all processes, but one has died "
        b"or left: INTERNAL",
    ],
)
def test_a_lost_peer_is_a_symptom(line):
    assert is_symptom([b"Traceback (most recent call last):", line])


def test_a_bug_is_none():
    assert not is_symptom([b"Traceback (most recent call last):", b"KeyError: 'w'"])


def test_silence_is_none():
    assert not is_symptom([])


@pytest.mark.parametrize(
    "line",
    [
        b"replicator.errors.NonFiniteError: `loss` must be finite, got nan at step 17",
        b"replicator.errors.SpikeError: `loss` must stay in its range, got 7.1",
        b"replicator.errors.DistributedError: The group must be joined by each process "
        b"that `replicator launch` starts, got one of 2 that is alone.",
    ],
)
def test_what_the_same_bits_lead_to_would_come_again(line):
    assert comes_again([b"Traceback (most recent call last):", line])


def test_a_bug_may_not_come_again():
    assert not comes_again([b"Traceback (most recent call last):", b"KeyError: 'w'"])
