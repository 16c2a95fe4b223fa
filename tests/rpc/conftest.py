"""What all tests of rpc share."""

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def only_new_objects_are_looked_through():
    """Make `gc.collect` quick: modules, jax above all, are hundred thousands."""
    gc.collect()
    gc.freeze()
