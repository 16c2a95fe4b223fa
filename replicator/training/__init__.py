"""One run, opening to end: where steps meet the clock, the disk and signals."""

import lazy_loader

# `replicator.options` is looked up here, and loaded when it is first used.
__getattr__, _, _ = lazy_loader.attach(__name__, submodules=["options"])
