"""Selectors of Reverb that have an equivalent."""

from replicator.launchpad_bridge.compat.reverb_words import (
    Fifo,
    Lifo,
    MinHeap,
    Prioritized,
    Uniform,
)
from replicator.launchpad_bridge.compat.submodules import missing

__all__ = ["Fifo", "Lifo", "MinHeap", "Prioritized", "Uniform"]

__getattr__ = missing("reverb.selectors")
