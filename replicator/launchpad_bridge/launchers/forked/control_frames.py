"""Small messages between a launcher and its fork server: JSON, with descriptors.

Both are one program and share a socket that nobody else can reach; nothing is unpickled
all the same. A message is the head of a frame, as reports of workers are framed;
descriptors travel with its first bytes, in order.
"""

import json
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from replicator.launchpad_bridge.launchers.worker_reports import ReportFrameReader, pack

_READ_BYTES = 1 << 16
_MOST_DESCRIPTORS = 64
_JSON = b"j"

Message = dict[str, Any]


def frame(message: Message) -> bytes:
    """Return the bytes of one message."""
    return pack(_JSON, json.dumps(message).encode())


def send(to: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message; the descriptors stay open here.

    Raises:
      OSError: The other end is gone.
    """
    # The kernel may take only a part; descriptors have gone with its first byte then.
    data = frame(message)
    sent = socket.send_fds(to, [data], list(descriptors))
    to.sendall(data[sent:])


class Receiver:
    """The messages that arrive on one socket."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        # Both are used by the one thread that receives.
        self._frames = ReportFrameReader()
        self._descriptors: deque[int] = deque()

    def receive(self) -> list[Message] | None:
        """Read once; return what is whole, None at the end.

        On a socket that has nothing in time, or does not block, the list is empty.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._source, _READ_BYTES, _MOST_DESCRIPTORS
            )
        except (BlockingIOError, TimeoutError):
            return []
        except ConnectionError:
            return None
        # They arrive with the first byte of their message. The order of both is kept,
        # so each message finds its own.
        self._descriptors.extend(descriptors)
        if not data:
            return None
        return [json.loads(frame.head) for frame in self._frames.feed(data)]

    def receive_one(self) -> Message | None:
        """Wait for the first message; None if the other end is gone."""
        while True:
            messages = self.receive()
            if messages is None or messages:
                return messages[0] if messages else None

    def take_descriptor(self) -> int:
        """Return the descriptor that came with the oldest message that had one."""
        descriptor = self._descriptors.popleft()
        # A command that this process starts must not hold a worker's channel open.
        os.set_inheritable(descriptor, False)
        return descriptor

    def close_descriptors(self) -> None:
        """Close those that nobody took."""
        while self._descriptors:
            os.close(self._descriptors.popleft())
