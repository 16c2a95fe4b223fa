"""New arrays for what a handler returns, where they are sent from without a copy."""

import math
from collections.abc import Sequence

import numpy as np

from replicator.rpc.codec.value_writer import LONG_BYTES
from replicator.rpc.codec.wire_format import aligned
from replicator.rpc.server.served_call import running_here

_ROOM_BYTES = 1 << 16  # for short arrays that the handler returns beside these


def reply_arrays(
    forms: Sequence[tuple[tuple[int, ...], np.dtype]],
) -> list[np.ndarray]:
    """Return new arrays, not initialised, for the result of the call that runs here.

    To another process of this host they are sent from where they are, if they come
    first in the result, all of them in this order: what is written to them later, the
    receiver may see, and one left out may be written over. Anywhere else, and outside
    of a call, they are as those of `np.empty`.

    Args:
      forms: Shape and dtype of each.

    >>> [array] = reply_arrays([((2, 3), np.dtype(np.float32))])
    >>> array.shape
    (2, 3)
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in forms]
    offsets, end = [], 0
    for size in sizes:  # as `lay_out` places them: short ones are in the head
        start = aligned(end)
        offsets.append(start)
        end = start + size if size >= LONG_BYTES else end
    call, memory = running_here.call, None
    if call is not None and end:
        memory = call.caller.connection.memory(end + _ROOM_BYTES)
    if memory is None:
        return [np.empty(shape, dtype) for shape, dtype in forms]
    return [
        np.ndarray(shape, dtype, memory, offset)
        if size >= LONG_BYTES
        else np.empty(shape, dtype)
        for (shape, dtype), size, offset in zip(forms, sizes, offsets, strict=True)
    ]
