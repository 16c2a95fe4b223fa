"""Launchpad's courier, as programs import it; see `compat.submodules`."""

from replicator.launchpad_bridge.compat import submodules

globals().update(submodules.fill(__name__))
