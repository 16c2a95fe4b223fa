"""The value of a message on its way to who asks for it."""

from typing import final

from replicator.protocols import PyTree
from replicator.rpc.codec.codec import decode
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import Registry


@final
class EncodedPayload:
    """A value as bytes, decoded when it is asked for; see `Payload`."""

    __slots__ = ("_body", "_head", "_limits", "_registry")

    def __init__(
        self,
        head: bytes,
        body: memoryview | bytes,
        registry: Registry,
        limits: MessageLimits,
    ) -> None:
        """Hold what the codec of the other end wrote; the body is read-only."""
        self._head = head
        self._body = body
        self._registry = registry
        self._limits = limits

    @property
    def num_bytes(self) -> int:
        """Return how many bytes the value takes."""
        return len(self._head) + len(self._body)

    def value(self) -> PyTree:
        """Return the value; arrays are read-only and keep their memory alive.

        Raises:
          DecodeError: The bytes are no value of ours, or past a limit.
        """
        return decode(
            self._head, self._body, registry=self._registry, limits=self._limits
        )


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
