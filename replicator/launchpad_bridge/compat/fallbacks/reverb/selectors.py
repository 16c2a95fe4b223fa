"""Selectors of Reverb that have an equivalent."""

from replicator.launchpad_bridge.compat.reverb_words import (
    Fifo,
    Lifo,
    MinHeap,
    Prioritized,
    Uniform,
)

__all__ = ["Fifo", "Lifo", "MinHeap", "Prioritized", "Uniform"]
