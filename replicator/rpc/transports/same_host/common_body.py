"""Body of a message that is sent to many: written once, and read by all in place.

    memory, new or spare ──▶ written ──▶ lent, by any number of connections
          ▲                                          │ nobody will send it again
          └── when all receivers have released it ◀── spare

Memory is used again because new memory costs more than the copy, at both ends: the
system has to clear its pages, and each receiver to map them. A receiver can read all
that is ever written to memory that it has been given. So spare memory is not shared by
the process, but passes from a value to those `after` it, for the same callers.

Two threads may look for spare memory at once, and a value may die in any thread, at any
line: so no lock guards the list of spare memory, and the thread that takes an item out
of it is its only owner.
"""

import contextlib
import os
import weakref

import numpy as np

from replicator.rpc.codec.encoded_once import EncodedOnce
from replicator.rpc.transports.frames import BufferLayout, lay_out
from replicator.rpc.transports.same_host.outgoing_segments import (
    CommonMemory,
    size_class,
)

_MOST_SPARE = 4
_MOST_SPARE_BYTES = 256 << 20
_LONG_COPY_BYTES = 4 << 20


class CommonBody:
    """The body of a message in common memory.

    Attributes:
      memory: Memory that holds it, from the start on.
      num_bytes: Number of bytes.
    """

    __slots__ = ("__weakref__", "memory", "num_bytes")

    def __init__(self, layout: BufferLayout, spare: list[CommonMemory]) -> None:
        """Copy a body into memory.

        Args:
          layout: Layout of its buffers.
          spare: Memory that may be used again; this one joins it when the body dies.

        Raises:
          OSError: The system has no memory for it.
        """
        size = size_class(layout.num_bytes)
        self.memory = _used_again(spare, size) or CommonMemory(size)
        self.num_bytes = layout.num_bytes
        # Written before any frame names it, by this thread alone: no lock.
        copy_body(layout, self.memory.memory)
        weakref.finalize(self, _put_aside, spare, self.memory).atexit = False


def kept_layout(kept: EncodedOnce, buffers: list[memoryview]) -> BufferLayout:
    """Return the layout of the buffers of an encoding that `kept` keeps."""
    # One encoding has one list, which lives as long.
    return kept.kept((BufferLayout, id(buffers)), lambda: lay_out(buffers))


def kept_body(kept: EncodedOnce, layout: BufferLayout) -> CommonBody:
    """Return the body that all connections send of an encoding.

    Raises:
      OSError: The system has no memory for it.
    """
    # Not one of the process that this was forked from, which may write to it again.
    key = CommonBody, id(layout), os.getpid()
    return kept.kept(key, lambda: CommonBody(layout, kept.spare))


def copy_body(layout: BufferLayout, memory: memoryview) -> None:
    """Write a body to memory."""
    for offset, buffer in zip(layout.offsets, layout.buffers, strict=True):
        part = slice(offset, offset + len(buffer))
        if len(buffer) < _LONG_COPY_BYTES:
            memory[part] = buffer
        else:  # NumPy, which is slower to start, lets other threads run meanwhile
            np.copyto(
                np.frombuffer(memory[part], np.uint8), np.frombuffer(buffer, np.uint8)
            )


def _used_again(spare: list[CommonMemory], size: int) -> CommonMemory | None:
    """Return memory of that size that no receiver sees any more."""
    # A copy: other threads append and remove meanwhile.
    for memory in [*spare]:
        if memory.num_bytes == size and memory.is_free():
            with contextlib.suppress(ValueError):  # another thread was quicker
                spare.remove(memory)
                return memory
    return None


def _put_aside(spare: list[CommonMemory], memory: CommonMemory) -> None:
    """Keep memory whose body will not be sent again; drop the oldest."""
    spare.append(memory)
    while (
        len(spare) > _MOST_SPARE
        or sum(each.num_bytes for each in [*spare]) > _MOST_SPARE_BYTES
    ):
        with contextlib.suppress(IndexError):  # another thread was quicker
            del spare[0]
