"""What tests of the input share: small batches whose examples can be told apart."""

import jax
import numpy as np

from replicator.inputs import InputOptions, open_input


def batches(*sizes):
    """Number the examples of all batches from 0 on."""
    starts = np.cumsum([0, *sizes])
    return [
        {"x": np.arange(start, start + size, dtype=np.float32)}
        for start, size in zip(starts, sizes, strict=False)
    ]


def read(dataset, layout, *, limit=100, **options):
    """Read everything that an input yields, as `Placed`."""
    options = InputOptions(timeout_s=60.0, **options)
    items = []
    with open_input(dataset, layout, options=options) as placed:
        for item in placed:
            items.append(item)
            if len(items) == limit:
                break
    return items


def values(items):
    """Bring the values of many `Placed` to the host."""
    return jax.device_get([item.value for item in items])
