"""Turn a value into a head and the bytes of its arrays, and back, exactly.

The head is msgpack. What msgpack has no type for is an extension, or a list that begins
with a tag: `[tuple, 1, 2]`, `[object, "Point", "x", 1, "y", 2]`. Long arrays and long
bytes are not in the head: they are buffers, in the order in which the head names them,
untouched, and arrive as read-only views that keep their memory alive. An array that is
the whole value, or the one argument of a call, does without msgpack
(`single_array_messages`); a call without arguments is packed once
(`no_argument_calls`).

    arrives as it was   None, bool, int, float, complex, str, bytes, `...`, list, tuple,
                        dict, OrderedDict, set, frozenset, range, slice, date, datetime,
                        timedelta; NumPy arrays, scalars and dtypes (not of objects);
                        typed JAX keys; instances of what a `Registry` holds
    as something else   JAX arrays as NumPy arrays; bytearray and memoryview as bytes
    is refused          the rest, with an error that names its place in the value

Received bytes are not trusted: they are checked against `MessageLimits` before memory
is allocated; names are looked up in our own tables alone; nothing is evaluated.
"""

from typing import NamedTuple

from msgpack import unpackb

from replicator.base.types import PyTree
from replicator.errors import DecodeError, MessageTooLargeError
from replicator.rpc.codec.encoded_once import EncodedOnce
from replicator.rpc.codec.head_bounds import SHORT_HEAD_BYTES, check_bounds
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.no_argument_calls import (
    NoArgumentCall,
    decode_no_argument_call,
    encode_no_argument_call,
)
from replicator.rpc.codec.registry import DEFAULT_REGISTRY, Registry
from replicator.rpc.codec.single_array_messages import (
    decode_single_array,
    encode_single_array,
)
from replicator.rpc.codec.unsendable import find_unsendable, short_text
from replicator.rpc.codec.value_reader import Body, ValueReader, read_dict
from replicator.rpc.codec.value_writer import ValueWriter, holds_long_bytes
from replicator.rpc.codec.wire_format import (
    NO_ARGUMENTS,
    NONE,
    SINGLE_ARRAY,
    SURROGATES,
    too_large,
)

_DEFAULT_LIMITS = MessageLimits()
# A head that is so much longer than its arrays is searched for long bytes.
_SEARCHED_BYTES = 1 << 16
_new_tuple = tuple.__new__  # a named one at half the price


class Encoded(NamedTuple):
    """A value as bytes.

    Attributes:
      head: msgpack.
      buffers: One-dimensional views of bytes, none of them empty; no copies where the
        value has them in one piece, so send them before it changes.
      num_bytes: Number of bytes of the head and the buffers.
    """

    head: bytes
    buffers: list[memoryview]
    num_bytes: int


def encode(
    value: PyTree,
    *,
    registry: Registry = DEFAULT_REGISTRY,
    limits: MessageLimits = _DEFAULT_LIMITS,
) -> Encoded:
    """Turn a value into bytes.

    Args:
      value: Any nesting of the types in the module's docstring.
      registry: Classes that may be sent.
      limits: Limits of the receiver.

    Returns:
      The head, and buffers to be sent along with it.

    Raises:
      EncodeError: A part of the value cannot be sent; the error names it and its place.
      MessageTooLargeError: The value exceeds a limit.

    >>> encode({"step": 3}).num_bytes
    7
    >>> encode({"step": object()})
    Traceback (most recent call last):
    ...
    replicator.errors.EncodeError: `value['step']` must be of a type that can be sent,
    got a object. ...
    """
    if value is None:  # what most methods return
        return _new_tuple(Encoded, (NONE, [], len(NONE)))
    if type(value) is EncodedOnce:
        plain = value.value
        return value.kept(
            (encode, registry, limits),
            lambda: encode(plain, registry=registry, limits=limits),
        )
    try:
        if type(value) is NoArgumentCall:
            head = encode_no_argument_call(*value)
            num_bytes = len(head)
            is_fit = (
                num_bytes <= limits.head_bytes and num_bytes <= limits.message_bytes
            )
            if head and is_fit and limits.depth > 0:
                return _new_tuple(Encoded, (head, [], num_bytes))
            value = [*value]
        lone = encode_single_array(value, limits)
        if lone is not None:
            return _new_tuple(Encoded, lone)
        writer = ValueWriter(registry, limits)
        pack = writer.pack_apart if holds_long_bytes(value) else writer.pack
        head = pack(value)
        is_long = len(head) - writer.in_head_bytes > _SEARCHED_BYTES
        if is_long or len(head) > limits.head_bytes:
            # msgpack puts bytes into the head without asking: set the long ones apart.
            check_bounds(head, limits, opaque_bytes=writer.in_head_bytes)
            writer = ValueWriter(registry, limits)
            head = writer.pack_apart(value)
    except (MessageTooLargeError, MemoryError):
        raise
    except Exception as error:
        raise find_unsendable(
            value,
            registry=registry,
            limits=limits,
            send=lambda leaf: ValueWriter(registry, limits).pack(leaf),
        ) from error
    num_bytes = len(head) + writer.buffer_bytes
    if num_bytes > limits.message_bytes:
        raise too_large("bytes", num_bytes, "message_bytes", limits.message_bytes)
    if len(head) > limits.head_bytes:
        raise _head_too_large(len(head), limits)
    if writer.num_leaves > limits.leaves:
        raise too_large("arrays", writer.num_leaves, "leaves", limits.leaves)
    if len(head) - writer.in_head_bytes > limits.depth:
        check_bounds(head, limits, opaque_bytes=writer.in_head_bytes)
    return _new_tuple(Encoded, (head, writer.buffers, num_bytes))


def decode(
    head: bytes | memoryview,
    body: Body = b"",
    *,
    registry: Registry = DEFAULT_REGISTRY,
    limits: MessageLimits = _DEFAULT_LIMITS,
) -> PyTree:
    """Turn untrusted bytes back into the value.

    Args:
      head: Head that `encode` returned.
      body: Memory that holds the buffers where `lay_out` puts them. Long arrays in the
        value are views of it, each of which keeps it alive.
      registry: Classes that may arrive.
      limits: Limits of what is accepted.

    Raises:
      DecodeError: The bytes are not a valid value.
      MessageTooLargeError: The value exceeds a limit.

    >>> decode(encode({"shape": (2, 3), "name": "w"}).head)
    {'shape': (2, 3), 'name': 'w'}
    """
    if head == NONE and not len(body):
        return None
    num_bytes = len(head)
    if num_bytes > limits.head_bytes:
        raise _head_too_large(num_bytes, limits)
    try:
        if num_bytes and head[0] == SINGLE_ARRAY:
            if head[:2] == NO_ARGUMENTS:
                return decode_no_argument_call(head, body, limits)
            return decode_single_array(head, body, limits)
        if num_bytes > SHORT_HEAD_BYTES:
            check_bounds(head, limits)
        reader = ValueReader(body, registry, limits)
        value = unpackb(
            head,
            ext_hook=reader.read_extension,
            list_hook=reader.read_list,
            object_pairs_hook=read_dict,
            strict_map_key=False,
            unicode_errors=SURROGATES,
        )
    except (DecodeError, MessageTooLargeError):
        raise
    except Exception as error:  # also what constructors of registered classes raise
        raise DecodeError(
            f"The received bytes are not a valid value: {short_text(error)}."
        ) from error
    reader.finish()
    if limits.depth < num_bytes - reader.in_head_bytes <= SHORT_HEAD_BYTES:
        check_bounds(head, limits, opaque_bytes=reader.in_head_bytes)
    return value


def _head_too_large(num_bytes: int, limits: MessageLimits) -> MessageTooLargeError:
    what = "bytes that are not of arrays"
    return too_large(what, num_bytes, "head_bytes", limits.head_bytes)
