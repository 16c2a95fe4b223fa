"""What all tests of the controller share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def nothing_older_is_looked_through(quick_collections):
    """What lives still on islands is asked of `gc.collect`."""
