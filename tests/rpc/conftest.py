"""What all tests of rpc share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def nothing_older_is_looked_through(quick_collections):
    """Whether something is left open is asked of `gc.collect`, in file after file."""
