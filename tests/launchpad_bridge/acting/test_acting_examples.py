"""Examples in the docstrings of `acting` run."""

import doctest
import importlib
import pkgutil

import pytest

from replicator.launchpad_bridge import acting

MODULES = [module.name for module in pkgutil.iter_modules(acting.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_an_example_says_what_happens(name):
    module = importlib.import_module(f"{acting.__name__}.{name}")
    assert doctest.testmod(module).failed == 0
