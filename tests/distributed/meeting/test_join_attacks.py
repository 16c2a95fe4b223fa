"""Strangers try to get into a group of two real processes."""

import sys

import pytest

from benchmarks.join_attack import coordinator, meeting
from benchmarks.join_attack.group import Group
from replicator.distributed.meeting.coordinator_tls import jax_has_tls

NEED_TLS = [
    "coordinator_by_a_member",
    "coordinator_without_a_certificate",
    "coordinator_with_another_runs",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", meeting.ATTACKS)
def test_join_attacks_fail(name, tmp_path):
    with Group(tmp_path, sys.executable) as group:
        meeting.ATTACKS[name](group)
        if not group.has_joined:
            group.joined_s()
        group.still_talks()


@pytest.mark.skipif(not jax_has_tls(), reason="JAX has mutual TLS from 0.12 on")
@pytest.mark.parametrize("name", NEED_TLS)
def test_join_attacks_on_jax_itself_fail(name, tmp_path):
    with Group(tmp_path, sys.executable) as group:
        coordinator.ATTACKS[name](group)
        group.still_talks()


@pytest.mark.slow
def test_without_a_secret_a_stranger_gets_in(tmp_path):
    """So the attacks show something."""
    with Group(tmp_path, sys.executable, has_secret=False) as group:
        group.start_0()
        assert b'{"go"' in meeting.greet(group)


@pytest.mark.slow
def test_the_secret_itself_gets_in(tmp_path):
    """So what refuses others is the secret."""
    with Group(tmp_path, sys.executable) as group:
        group.start_0()
        assert b'{"go"' in meeting.prove(group, group.secret, meeting.BINDING)
