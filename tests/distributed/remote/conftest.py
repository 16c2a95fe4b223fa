"""Fixtures of tests of hosts."""

import pytest

from tests.distributed.remote.one_host import LONG_S, Host


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path)
    yield host
    for member in host.members:
        for _ in range(3):
            member.kill()
            member.join(LONG_S / 6)
