"""The value of a message on its way to who asks for it."""

from typing import NamedTuple, final

from replicator.protocols import PyTree
from replicator.rpc.codec.codec import decode
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import Registry
from replicator.rpc.transports.frames import Body


class EncodedPayload(NamedTuple):
    """A value as bytes, decoded when it is asked for; see `Payload`.

    Attributes:
      head: What the codec of the other end wrote.
      body: Likewise; read-only.
      registry: Classes that may travel.
      limits: Of messages.
    """

    head: bytes
    body: Body
    registry: Registry
    limits: MessageLimits

    @property
    def num_bytes(self) -> int:
        """Return how many bytes the value takes."""
        return len(self.head) + len(self.body)

    def value(self) -> PyTree:
        """Return the value; arrays are read-only and keep their memory alive.

        Raises:
          DecodeError: The bytes are no value of ours, or past a limit.
        """
        return decode(self.head, self.body, registry=self.registry, limits=self.limits)


@final
class PlainPayload:
    """A value itself: nothing was encoded."""

    __slots__ = ("_value",)

    def __init__(self, value: PyTree) -> None:
        """Hold `value`."""
        self._value = value

    @property
    def num_bytes(self) -> int:
        """Return 0."""
        return 0

    def value(self) -> PyTree:
        """Return the object that was sent."""
        return self._value
