"""Launchpad, as programs import it; the table of its names is `compat.submodules`."""

from replicator.launchpad_bridge.compat import submodules

globals().update(submodules.fill(__name__))
