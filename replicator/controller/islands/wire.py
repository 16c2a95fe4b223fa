"""Messages between a controller and islands elsewhere, as plain data.

What arrives is checked here: an order is one of five, its numbers are numbers.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from replicator.base.types import PyTree
from replicator.controller.islands.protocol import (
    Call,
    Computation,
    Drop,
    Key,
    Order,
    Put,
    Receive,
    Send,
)
from replicator.controller.layouts import SliceLayout
from replicator.errors import ArgumentError, IslandLostError, OpFailedError

Data = Any
"""Lists, dictionaries, texts, numbers and arrays."""

_LOST = "lost"


def layout_data(layout: SliceLayout | None) -> Data:
    """Return a layout as data."""
    if layout is None:
        return None
    axes = [[name, size] for name, size in layout.axes]
    return [axes, [list(e) if isinstance(e, tuple) else e for e in layout.spec]]


def layout_from(data: Data) -> SliceLayout | None:
    """Return the layout of data.

    >>> layout_from([[["x", 2]], ["x", None]]).axes
    (('x', 2),)
    """
    if data is None:
        return None
    axes, spec = data
    entries = (tuple(e) if isinstance(e, Sequence) and e != str(e) else e for e in spec)
    return SliceLayout(
        axes=tuple((str(name), int(size)) for name, size in axes),
        spec=PartitionSpec(*entries),
    )


def order_data(order: Order, number_of: Callable[[Computation], int]) -> Data:
    """Return an order as data; its computation by number."""
    if isinstance(order, Call):
        number = number_of(order.computation)
        return ["call", number, list(order.inputs), list(order.outputs)]
    if isinstance(order, Put):
        layout = layout_data(order.layout)
        return ["put", order.output, list(order.places), layout]
    if isinstance(order, Send):
        numbers = [order.input, order.output]
        to = [order.target, list(order.sources), list(order.targets)]
        return ["send", *numbers, list(order.places), *to]
    if isinstance(order, Receive):
        where = [list(order.places), list(order.senders)]
        what = [layout_data(order.layout), list(order.shape)]
        return ["receive", order.source, order.output, *where, *what]
    return ["drop", list(order.values)]


def order_from(data: Data, computations: Mapping[int, Computation]) -> Order:
    """Return the order of data.

    Raises:
      ArgumentError: It is none.
    """
    try:
        kind, *rest = data
        return _ORDERS[kind](computations, *rest)
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"an order must be one that a controller sends, got {data!r:.200}. Use the "
            "same version of replicator on both sides."
        ) from error


def _call(
    computations: Mapping[int, Computation], number: int, inputs: Data, outputs: Data
) -> Call:
    return Call(
        computation=computations[number],
        inputs=_numbers(inputs),
        outputs=_numbers(outputs),
    )


def _put(_: Any, output: int, places: Data, layout: Data) -> Put:
    return Put(output=output, places=_numbers(places), layout=layout_from(layout))


def _send(_: Any, given: int, output: int, places: Data, *to: Data) -> Send:
    target, sources, targets = to
    return Send(
        input=given,
        output=output,
        places=_numbers(places),
        target=target,
        sources=_numbers(sources),
        targets=_numbers(targets),
    )


def _receive(_: Any, source: str, output: int, places: Data, *what: Data) -> Receive:
    senders, layout, shape = what
    found = layout_from(layout)
    if found is None:
        raise ValueError("no layout")
    return Receive(
        source=source,
        output=output,
        places=_numbers(places),
        senders=_numbers(senders),
        layout=found,
        shape=_numbers(shape),
    )


def _drop(_: Any, values: Data) -> Drop:
    return Drop(values=_numbers(values))


_ORDERS: dict[str, Callable[..., Order]] = {
    "call": _call,
    "put": _put,
    "send": _send,
    "receive": _receive,
    "drop": _drop,
}


def _numbers(data: Data) -> tuple[int, ...]:
    return tuple(map(int, data))


def keys_data(inputs: Mapping[int, Key]) -> Data:
    """Return the keys of values by number, as data."""
    return [[number, *key] for number, key in inputs.items()]


def keys_from(data: Data) -> dict[int, Key]:
    """Return the keys of data."""
    return {int(number): (int(run), int(value)) for number, run, value in data}


def array_data(array: Any) -> Data:
    """Return an array as data; random keys by their numbers.

    Of one that is on devices of several processes, the parts of which this process has
    the first copy.
    """
    if not getattr(array, "is_fully_addressable", True):
        parts = [each for each in array.addressable_shards if each.replica_id == 0]
        begins = [[cut.start or 0 for cut in each.index] for each in parts]
        arrays = [array_data(each.data) for each in parts]
        return {"shape": list(array.shape), "begins": begins, "parts": arrays}
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(array)
    numbers = np.asarray(jax.random.key_data(array))
    return [str(jax.random.key_impl(array)), numbers]


def array_from(data: Data) -> Any:
    """Return the array of data."""
    if not isinstance(data, Sequence):
        return data
    kind, numbers = data
    return jax.random.wrap_key_data(jnp.asarray(numbers), impl=kind)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArrayParts:
    """What one process has of an array.

    Attributes:
      shape: Of the whole array.
      parts: Arrays, and where each begins.
    """

    shape: tuple[int, ...]
    parts: Sequence[tuple[tuple[int, ...], Any]]


def array_on_device(data: Data) -> Any:
    """Return the array of data on a device of this process, or the parts of one."""
    if not isinstance(data, Mapping):
        return jnp.asarray(array_from(data))
    parts = zip(data["begins"], map(array_from, data["parts"]), strict=True)
    return ArrayParts(
        shape=_numbers(data["shape"]),
        parts=[(_numbers(begin), array) for begin, array in parts],
    )


def joined_parts(found: Sequence[Any]) -> jax.Array:
    """Return the array of the parts that processes have; a whole one is as it is.

    >>> one = ArrayParts(shape=(2,), parts=[((0,), np.ones(1))])
    >>> two = ArrayParts(shape=(2,), parts=[((1,), np.zeros(1))])
    >>> joined_parts([one, two]).tolist()
    [1.0, 0.0]
    """
    if not isinstance(found[0], ArrayParts):
        return found[0]
    parts = [part for each in found for part in each.parts]
    is_key = jnp.issubdtype(parts[0][1].dtype, jax.dtypes.prng_key)
    arrays = [jax.random.key_data(array) if is_key else array for _, array in parts]
    more = arrays[0].shape[len(found[0].shape) :]
    whole = np.empty((*found[0].shape, *more), arrays[0].dtype)
    for (begin, _), array in zip(parts, arrays, strict=True):
        sizes = zip(begin, array.shape, strict=False)
        whole[tuple(slice(at, at + size) for at, size in sizes)] = array
    array = jnp.asarray(whole)
    if not is_key:
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(parts[0][1]))


def shards_data(shards: Sequence[Any]) -> Data:
    """Return shards as data: each that is different, and which each device has."""
    numbers = {id(each): n for n, each in enumerate(reversed(shards))}
    last = len(shards) - 1
    places = [last - numbers[id(each)] for each in shards]
    kept = sorted(set(places))
    arrays = [array_data(shards[at]) for at in kept]
    return [arrays, [kept.index(at) for at in places]]


def shards_from(data: Data) -> list[Any]:
    """Return the shards of data, one for each device.

    >>> one = np.ones(2)
    >>> len(shards_from([[one], [0, 0]]))
    2
    """
    arrays, places = data
    found = [array_from(each) for each in arrays]
    return [found[at] for at in places]


def error_data(error: BaseException | None) -> Data:
    """Return an error of an op as data."""
    if error is None:
        return None
    found = error if isinstance(error, OpFailedError) else OpFailedError(str(error))
    kind = _LOST if isinstance(error, IslandLostError) else ""
    return [str(found), found.op, found.island, found.line, kind]


def error_from(data: Data) -> OpFailedError | None:
    """Return the error of data.

    >>> error_from(["no room", "add", "island0", "", ""]).island
    'island0'
    """
    if data is None:
        return None
    text, op, island, line, kind = map(str, data)
    error = IslandLostError(text) if kind == _LOST else OpFailedError(text)
    error.op, error.island, error.line = op, island, line
    return error


def values_data(values: Mapping[int, PyTree]) -> Data:
    """Return arrays of the host by number, as data."""
    return [[number, array_data(array)] for number, array in values.items()]


def values_from(data: Data) -> dict[int, Any]:
    """Return the arrays of data."""
    return {int(number): array_from(array) for number, array in data}
