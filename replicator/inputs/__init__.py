"""Turn any dataset into batches on the mesh, read ahead in the background.

From the top: `feed` opens a dataset; `adapters` iterate over it; `rounds` read one
batch from every pipeline; `checks` refuse batches that do not fit; `remainder` pads and
masks the uneven last batch; `placement` places batches on replicas; `prefetch` does all
of this in a thread, ahead of the consumer.
"""

from replicator.inputs.adapters import Adapter
from replicator.inputs.context import InputContext, InputMode
from replicator.inputs.feed import open_input
from replicator.inputs.options import InputOptions
from replicator.inputs.placement import Placed, place
from replicator.inputs.prefetch import Prefetcher
from replicator.inputs.remainder import Remainder

__all__ = [
    "Adapter",
    "InputContext",
    "InputMode",
    "InputOptions",
    "Placed",
    "Prefetcher",
    "Remainder",
    "open_input",
    "place",
]
