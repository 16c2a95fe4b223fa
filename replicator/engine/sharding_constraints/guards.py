"""Operations that XLA's partitioner gets wrong, and constraints that keep them right.

Writes into arrays that are cut along the written dimensions, shifts of them (negative
and interior padding), and convolutions in groups come out wrong on many meshes, in
plain `jax.jit` too, on either partitioner (jaxlib 0.10; 0.12 mends two writes in a
row). So do two pads of one array with other fills, which windows and cumulative sums
bring with them: one padded array is used for both. Transposed convolutions may not
compile. Here such an operation is kept from being cut along the dimensions that it
writes, shifts, groups, spreads or pads; all others may be cut as the partitioner likes,
as may operations that are not in the table.

Two ways are cheaper, and right: a write of one place is chosen element by element, and
rows of a batch are added into zeros as they lie (the gradient of an embedding).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

from replicator.engine.analysis.dataflow import shape_of

FREE = PartitionSpec.UNCONSTRAINED
"""Stands for a mesh axis: the dimension may be cut in any way."""

GuardedCut = tuple[Any, ...]


class Guard(NamedTuple):
    """Cuts that an operation allows: None or `FREE` for each dimension.

    Attributes:
      operands: Cuts of each operand.
      result: Cuts of its result.
    """

    operands: tuple[GuardedCut, ...]
    result: GuardedCut


def guard_of(eqn: core.JaxprEqn, *, is_shared: bool = False) -> Guard | None:
    """Return the cuts that an operation allows; None if all are left to XLA.

    Args:
      eqn: The operation.
      is_shared: Whether several devices have the same examples, along `model`.
    """
    find = GUARDS.get(eqn.primitive.name)
    guard = find and find(eqn)
    if guard and is_shared and eqn.params.get("batch_group_count", 1) > 1:
        # XLA adds up the sums of all of them, as if their examples differed.
        whole = (None,) * len(guard.operands[1])
        guard = guard._replace(operands=(guard.operands[0], whole))
    return guard


def adds_rows(eqn: core.JaxprEqn, pieces: int) -> bool:
    """Return whether rows are added that may lie in pieces of a batch, which divide.

    That is right if they are added into zeros, and to gather them would be dear:
    gradients of embeddings, examples sent to experts.
    """
    if eqn.primitive.name != "scatter-add":
        return False
    dims, updates = eqn.params["dimension_numbers"], shape_of(eqn.invars[2])
    rows = [d for d in range(len(updates)) if d not in dims.update_window_dims]
    return bool(rows) and updates[rows[0]] % pieces == 0


def chosen_write(eqn: core.JaxprEqn, values: Sequence) -> jax.Array | None:
    """Write one place by choosing between old and new; None for any other operation.

    Each element follows from those at its position, so no array has to be whole. It
    costs a pass over the array, or over a device's piece of it.
    """
    operand, shape = values[0], jnp.shape(values[0])
    if (found := _starts(eqn, values)) is None:
        return None
    (starts, updates), window = found, _window(eqn)
    if window != [1 if d in starts else size for d, size in enumerate(shape)]:
        return None
    is_there = jnp.ones(shape, bool)
    for place, start in starts.items():
        start = jnp.asarray(start).astype(jnp.int32)
        if eqn.params.get("mode", _CLIP) == _CLIP:
            start = lax.clamp(jnp.int32(0), start, jnp.int32(shape[place] - 1))
        is_there &= lax.broadcasted_iota(jnp.int32, shape, place) == start
    new = jnp.broadcast_to(jnp.reshape(updates, window), shape)
    write = _WRITES.get(eqn.primitive.name)
    return jnp.where(is_there, new if write is None else write(operand, new), operand)


def _starts(eqn: core.JaxprEqn, values: Sequence) -> tuple[dict, Any] | None:
    """Return the start of a single write, by dimension, and the value written."""
    if eqn.primitive.name == "dynamic_update_slice":
        pairs = zip(jnp.shape(values[0]), _window(eqn), strict=True)
        part = [d for d, (size, window) in enumerate(pairs) if size != window]
        return {d: values[2 + d] for d in part}, values[1]
    by_function = eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"]
    if by_function:  # `.at[place].apply`: the new value follows from the old one
        return None
    if eqn.primitive.name in _SCATTERS and jnp.ndim(values[1]) == 1:
        places = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
        return {place: values[1][n] for n, place in enumerate(places)}, values[2]
    return None


def _scatter(eqn: core.JaxprEqn) -> Guard:
    dims = eqn.params["dimension_numbers"]
    operand, indices, updates = map(shape_of, eqn.invars)
    places, window = _window_places(eqn), _window(eqn)
    written = {*dims.inserted_window_dims, *dims.scatter_dims_to_operand_dims}
    written |= {d for d in places if window[d] < operand[d]}
    result = tuple(None if d in written else FREE for d in range(len(operand)))
    batch = dims.scatter_indices_batching_dims
    index = tuple(FREE if d in batch else None for d in range(len(indices)))
    rows = [d for d in range(len(updates)) if d not in dims.update_window_dims]
    lie = dict(zip(rows, index, strict=False))  # the last one of indices is no row
    lie |= {place: result[d] for d, place in places.items()}
    return Guard((result, index, tuple(lie[d] for d in range(len(updates)))), result)


def _dynamic_update_slice(eqn: core.JaxprEqn) -> Guard:
    pairs = zip(shape_of(eqn.invars[0]), _window(eqn), strict=True)
    cut = tuple(FREE if a == b else None for a, b in pairs)
    return Guard((cut, cut, *((),) * len(eqn.invars[2:])), cut)


def _pad(eqn: core.JaxprEqn) -> Guard | None:
    """Guard shifts, and fills that XLA may mix up with that of another pad."""
    padding, fill = eqn.params["padding_config"], eqn.invars[1]
    grows = all(low >= 0 and high >= 0 and not inside for low, high, inside in padding)
    if grows and isinstance(fill, core.Literal) and fill.val == 0:
        return None
    cut = tuple(FREE if not any(each) else None for each in padding)
    return Guard((cut, ()), cut)


def _cumulative(eqn: core.JaxprEqn) -> Guard:
    rank = len(shape_of(eqn.invars[0]))
    cut = tuple(None if d == eqn.params["axis"] else FREE for d in range(rank))
    return Guard((cut,), cut)


def _window_of_reduction(eqn: core.JaxprEqn) -> Guard | None:
    if len(eqn.outvars) > 1:
        return None
    sizes = zip(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), strict=True)
    windows = zip(eqn.params["window_dimensions"], sizes, strict=True)
    cut = tuple(FREE if n == 1 and a == b else None for n, (a, b) in windows)
    own = tuple(cut if shape_of(atom) else () for atom in eqn.invars)
    return Guard(own, cut)


def _convolution(eqn: core.JaxprEqn) -> Guard | None:
    """Guard groups, and images that are spread by zeros (of a transposed one)."""
    dims, rank = eqn.params["dimension_numbers"], len(shape_of(eqn.invars[0]))
    (image, image_on), (kernel, _), (result, result_on) = (
        (spec[:2], spec[2:]) for spec in (dims.lhs_spec, dims.rhs_spec, dims.out_spec)
    )
    spread = [place for place, by in enumerate(eqn.params["lhs_dilation"]) if by > 1]
    read = [image_on[place] for place in spread]
    made = [result_on[place] for place in spread]
    if eqn.params["feature_group_count"] > 1:
        read, made = [*read, image[1]], [*made, result[1]]
    elif eqn.params["batch_group_count"] > 1:
        read, made = [*read, image[0]], [*made, *result]
    elif not spread:
        return None

    def whole(*dimensions: int) -> GuardedCut:
        return tuple(None if d in dimensions else FREE for d in range(rank))

    grouped = kernel[:1] if len(read) > len(spread) else ()
    return Guard((whole(*read), whole(*grouped)), whole(*made))


_CLIP = lax.GatherScatterMode.CLIP

_WRITES: dict[str, Callable[[Any, Any], jax.Array]] = {
    "scatter-add": jnp.add,
    "scatter-sub": jnp.subtract,
    "scatter-mul": jnp.multiply,
    "scatter-min": jnp.minimum,
    "scatter-max": jnp.maximum,
}
_WINDOWS = (
    *("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"),
    *("select_and_scatter_add", "select_and_gather_add"),
)
_SCATTERS = frozenset({"scatter", *_WRITES})

GUARDS: dict[str, Callable[[core.JaxprEqn], Guard | None]] = {
    **dict.fromkeys(_SCATTERS, _scatter),
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), _cumulative),
    "cumlogsumexp": _cumulative,
    **dict.fromkeys(_WINDOWS, _window_of_reduction),
    "conv_general_dilated": _convolution,
}


def _window(eqn: core.JaxprEqn) -> list[int]:
    """Return the length of one write along each dimension of its array."""
    if eqn.primitive.name == "dynamic_update_slice":
        return list(shape_of(eqn.invars[1]))
    places = _window_places(eqn)
    updates = shape_of(eqn.invars[2])
    rank = len(shape_of(eqn.invars[0]))
    return [updates[places[d]] if d in places else 1 for d in range(rank)]


def _window_places(eqn: core.JaxprEqn) -> dict[int, int]:
    """Return the dimension of the updates for each dimension of the operand."""
    dims = eqn.params["dimension_numbers"]
    left_out = {*dims.inserted_window_dims, *dims.operand_batching_dims}
    kept = [d for d in range(len(shape_of(eqn.invars[0]))) if d not in left_out]
    return dict(zip(kept, dims.update_window_dims, strict=True))
