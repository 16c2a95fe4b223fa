"""Small messages between a launcher and its fork server: JSON, with descriptors.

Both are one program and share a socket that nobody else can reach; nothing is unpickled
all the same. A frame is its length, four bytes, and JSON; descriptors travel with the
length, in order.
"""

import json
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 16
_MOST_DESCRIPTORS = 64

Message = dict[str, Any]


def frame(message: Message) -> bytes:
    """Return the bytes of one message."""
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def send(to: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message; the descriptors stay open here.

    Raises:
      OSError: The other end is gone.
    """
    data = frame(message)
    sent = socket.send_fds(to, [data], list(descriptors))
    to.sendall(data[sent:])


class Receiver:
    """The messages that arrive on one socket."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        # Of the one thread that receives.
        self._begun = bytearray()
        self._descriptors: deque[int] = deque()

    def receive(self) -> list[Message] | None:
        """Read once; return what is whole, None at the end.

        On a socket that does not block and has nothing, the list is empty.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._source, _READ_BYTES, _MOST_DESCRIPTORS
            )
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        self._descriptors.extend(descriptors)
        if not data:
            return None
        self._begun += data
        return self._whole()

    def receive_one(self) -> Message | None:
        """Wait for the first message; None if the other end is gone."""
        while True:
            messages = self.receive()
            if messages is None or messages:
                return messages[0] if messages else None

    def take_descriptor(self) -> int:
        """Return the descriptor that came with the oldest message that had one."""
        descriptor = self._descriptors.popleft()
        os.set_inheritable(descriptor, False)
        return descriptor

    def close_descriptors(self) -> None:
        """Close those that nobody took."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _whole(self) -> list[Message]:
        messages = []
        while len(self._begun) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._begun)
            end = _LENGTH.size + length
            if len(self._begun) < end:
                break
            messages.append(json.loads(self._begun[_LENGTH.size : end]))
            del self._begun[:end]
        return messages
