"""Reverb for programs where it is not installed; see `compat.reverb_words`."""

from reverb import rate_limiters, selectors

from replicator.launchpad_bridge.compat.reverb_server import (
    ReplaySample,
    SampleInfo,
)
from replicator.launchpad_bridge.compat.reverb_server import ReverbClient as Client
from replicator.launchpad_bridge.compat.reverb_server import ReverbServer as Server
from replicator.launchpad_bridge.compat.reverb_server import ReverbWriter as Writer
from replicator.launchpad_bridge.compat.reverb_words import ReverbTable as Table
from replicator.launchpad_bridge.compat.submodules import missing

__all__ = [
    "Client",
    "ReplaySample",
    "SampleInfo",
    "Server",
    "Table",
    "Writer",
    "rate_limiters",
    "selectors",
]

__getattr__ = missing("reverb")
