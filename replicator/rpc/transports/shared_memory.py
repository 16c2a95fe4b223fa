"""Carry large buffers between two processes of a host with one copy, into shared memory.

The sender of a message owns the memory. It makes *segments* with `memfd_create`: without
a name, so that nothing is left when both processes are killed; sealed, so that neither
end can shrink one under the other (a SIGBUS), grow it, or, for the receiver, map it to
write. It cuts each into *slots* of one size, copies the buffers of a message into a free
slot, and sends the segment's number and the slot's offset.

Who may reuse a slot, and when: the sender alone, after the receiver has *released* it.
The receiver does so when the last array, view or payload of the message has died (each
keeps one owner object alive; a weak reference to it tells), in whatever thread that
happens. Until then the sender does not touch the slot. A segment all of whose slots are
free may be dropped to make room for one of another size.

Segments and releases travel beside the messages, over a socket pair of their own that
one end made and passed to the other after the handshake. So a release takes no lock of
the connection, wakes nobody, and waits in the kernel until the sender needs a slot; and
the messages' socket never has to look for descriptors.

    sender to receiver     attach number, bytes (with the descriptor); detach number
    receiver to sender     release (number, slot), ...

A receiver trusts nothing of that: it asks the kernel for size and seals before it maps,
maps to read only, and refuses more than its bound. Linux only; elsewhere, and past the
bound, and where memory is short, the socket takes the buffers.
"""

import array
import dataclasses
import fcntl
import logging
import mmap
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np

from replicator.errors import DecodeError
from replicator.rpc.transports.frames import Buffer, Where
from replicator.rpc.transports.receive_buffers import size_class
from replicator.rpc.transports.side_channel import Attach, Detach, Release, SideChannel

SHARED_FROM_BYTES = 1 << 18
"""Far buffers of a message that together have this size go by shared memory."""
_SEGMENT_BYTES = 16 << 20  # of slots smaller than this, several share a segment
_log = logging.getLogger(__name__)

IS_AVAILABLE = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
