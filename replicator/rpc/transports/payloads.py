"""The value of a received message, decoded when it is taken."""

import dataclasses

from replicator.base.types import PyTree
from replicator.rpc.codec.codec import Encoded, decode, encode
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import Registry
from replicator.rpc.transports.frames import Body


@dataclasses.dataclass(frozen=True, slots=True)
class Encoding:
    """Encoding of the values of a connection.

    Attributes:
      registry: Classes that may travel, besides the plain ones.
      limits: Limits of messages.
    """

    registry: Registry
    limits: MessageLimits

    def encode(self, value: PyTree) -> Encoded:
        """Return a value as bytes; see `codec.encode`."""
        return encode(value, registry=self.registry, limits=self.limits)


class EncodedPayload:
    """A value as bytes, decoded when it is taken; see `Payload`.

    Attributes:
      num_bytes: Number of bytes of the value.
    """

    __slots__ = ("_body", "_encoding", "_head", "num_bytes")

    def __init__(self, head: bytes, body: Body, encoding: Encoding) -> None:
        """Hold received bytes.

        Args:
          head: Head that the codec of the other end wrote.
          body: Body that it wrote; read-only.
          encoding: Encoding of the value.
        """
        self._head = head
        self._body = body
        self._encoding = encoding
        self.num_bytes = len(head) + len(body)

    def take(self) -> PyTree:
        """Return the value; arrays are read-only and keep their memory alive.

        Raises:
          DecodeError: The bytes are not a valid value, or exceed a limit.
        """
        # Dropped here: from now on the arrays alone keep the memory.
        body, self._body = self._body, b""
        known = self._encoding
        return decode(self._head, body, registry=known.registry, limits=known.limits)


class PlainPayload:
    """A value itself: nothing was encoded.

    Attributes:
      num_bytes: 0.
    """

    __slots__ = ("_value", "num_bytes")

    def __init__(self, value: PyTree) -> None:
        """Hold `value`."""
        self._value = value
        self.num_bytes = 0

    def take(self) -> PyTree:
        """Return the object that was sent.

        >>> PlainPayload({"step": 3}).take()
        {'step': 3}
        """
        value, self._value = self._value, None
        return value
