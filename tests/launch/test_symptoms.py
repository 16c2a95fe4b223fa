"""Which last words say that another process was the first to fail."""

import pytest

from replicator.launch.symptoms import is_symptom


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
