"""The value of a message on its way to who asks for it."""

from typing import final

from replicator.base.types import PyTree
from replicator.rpc.codec.codec import decode
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import Registry
from replicator.rpc.transports.frames import Body


@final
class EncodedPayload:
    """A value as bytes, decoded when it is taken; see `Payload`.

    Attributes:
      num_bytes: How many bytes the value takes.
    """

    __slots__ = ("_body", "_head", "_limits", "_registry", "num_bytes")

    def __init__(
        self, head: bytes, body: Body, registry: Registry, limits: MessageLimits
    ) -> None:
        """Hold what arrived.

        Args:
          head: What the codec of the other end wrote.
          body: Likewise; read-only.
          registry: Classes that may travel.
          limits: Of messages.
        """
        self._head = head
        self._body = body
        self._registry = registry
        self._limits = limits
        self.num_bytes = len(head) + len(body)

    def take(self) -> PyTree:
        """Return the value; arrays are read-only and keep their memory alive.

        Raises:
          DecodeError: The bytes are no value of ours, or past a limit.
        """
        body, self._body = self._body, b""
        return decode(self._head, body, registry=self._registry, limits=self._limits)


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
