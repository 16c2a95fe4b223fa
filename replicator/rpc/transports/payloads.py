"""The value of a message on its way to who asks for it."""

import dataclasses
from typing import final

from replicator.base.types import PyTree
from replicator.rpc.codec.codec import Encoded, decode, encode
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import Registry
from replicator.rpc.transports.frames import Body


@dataclasses.dataclass(frozen=True, slots=True)
class Encoding:
    """How the values of a connection become bytes, and values again.

    Attributes:
      registry: Classes that may travel, besides the plain ones.
      limits: Of messages.
    """

    registry: Registry
    limits: MessageLimits

    def encode(self, value: PyTree) -> Encoded:
        """Return a value as bytes; see `codec.encode`."""
        return encode(value, registry=self.registry, limits=self.limits)


@final
class EncodedPayload:
    """A value as bytes, decoded when it is taken; see `Payload`.

    Attributes:
      num_bytes: How many bytes the value takes.
    """

    __slots__ = ("_body", "_encoding", "_head", "num_bytes")

    def __init__(self, head: bytes, body: Body, encoding: Encoding) -> None:
        """Hold what arrived.

        Args:
          head: What the codec of the other end wrote.
          body: Likewise; read-only.
          encoding: How the value became that.
        """
        self._head = head
        self._body = body
        self._encoding = encoding
        self.num_bytes = len(head) + len(body)

    def take(self) -> PyTree:
        """Return the value; arrays are read-only and keep their memory alive.

        Raises:
          DecodeError: The bytes are no value of ours, or past a limit.
        """
        body, self._body = self._body, b""
        known = self._encoding
        return decode(self._head, body, registry=known.registry, limits=known.limits)


@final
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
        """Return the object that was sent."""
        value, self._value = self._value, None
        return value
