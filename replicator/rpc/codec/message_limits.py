"""Limits of a message, checked by sender and receiver before allocation.

And whether memory that its sender can still write is trusted.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MessageLimits:
    """Bounds of one message and of one connection, and whether its memory is trusted.

    Attributes:
      message_bytes: Most bytes of head and arrays of one message together.
      head_bytes: Most bytes of the head: names, numbers, strings, shapes; not arrays.
      depth: Deepest nesting of containers.
      leaves: Most arrays (and long strings of bytes) in one message.
      rank: Most dimensions of an array.
      in_flight_bytes: Most bytes of the calls of one connection that wait or run; past
        it the server reads no more from this client until some are done.
      in_flight_calls: Likewise, counted in calls.
      shared_bytes: Most shared memory of one connection, each way; past it the socket
        takes large arrays as well. 0: none.
      trusted_memory: Whether all arrays are used where they lie in shared memory. By
        default those of floats alone: an index that its sender changes meanwhile is
        read and written where it should not, so what holds others is copied.
    """

    message_bytes: int = 1 << 30
    head_bytes: int = 1 << 24
    depth: int = 64
    leaves: int = 65_536
    rank: int = 32
    in_flight_bytes: int = 2 << 30
    in_flight_calls: int = 4_096
    shared_bytes: int = 1 << 30
    trusted_memory: bool = False
