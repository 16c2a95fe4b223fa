"""One process alone (groups: tests/multiprocess)."""

import pytest

from replicator.checkpoint.group import Group


def test_a_process_alone_tells_and_asks_nobody():
    group = Group(together=False, timeout_s=1.0)
    assert group.share("anything", 5) == [5]
    assert group.lead("anything", lambda: [7]) == [7]


def test_what_goes_wrong_in_a_process_alone_is_raised_as_it_is():
    group = Group(together=None, timeout_s=1.0)
    with pytest.raises(OSError, match="full"):
        group.require_all("anything", OSError("full"))
