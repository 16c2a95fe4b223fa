"""Which modules a fork server imports."""

import sys

from replicator.launchpad_bridge.launchers.forked.preloading import heavy_modules


def test_installed_packages_and_our_own_are_listed_in_order_of_import():
    names = heavy_modules()
    assert {"jax", "jax.numpy", "numpy", "replicator.errors"} <= set(names)
    places = {name: place for place, name in enumerate(sys.modules)}
    assert names == sorted(names, key=places.__getitem__)


def test_the_standard_library_and_tools_are_not():
    names = set(heavy_modules())
    assert not names & {"os", "json", "__main__", "pytest", "_pytest", "pluggy"}


def test_modules_of_the_script_are_not():
    assert __name__ in sys.modules
    assert not [name for name in heavy_modules() if name.startswith("tests")]


def test_ray_which_only_the_launcher_uses_is_not(monkeypatch):
    for name in ("ray", "ray.actor", "rays"):
        monkeypatch.setitem(sys.modules, name, sys.modules["numpy"])
    assert {"ray", "ray.actor", "rays"} & set(heavy_modules()) == {"rays"}
