"""Check the arguments of `pmap` about axes and positions, and its arrays."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.trees import leaf_path, named_leaves
from replicator.base.types import PyTree
from replicator.compat.layout import WHOLE
from replicator.errors import ArgumentError


def require_function(fn: Any) -> None:
    """Refuse an object that cannot be mapped.

    Raises:
      ArgumentError: `fn` is not a function.
    """
    if not callable(fn) or inspect.isclass(fn):
        raise ArgumentError(
            f"`fn` must be a function, got {fn!r}. Pass the function of one replica."
        )


def check_positions(name: str, value: int | Iterable[int]) -> tuple[int, ...]:
    """Return positions of arguments in order.

    Raises:
      ArgumentError: One is no whole number from 0 on.
    """
    positions = (value,) if isinstance(value, int) else tuple(value)
    for position in positions:
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise ArgumentError(
                f"`{name}` must be positions from 0 on, got {position!r}. Count "
                "positional arguments from the left."
            )
    return tuple(sorted(set(positions)))


def with_sentinels(name: str, axes: Any) -> Any:
    """Write `WHOLE` for None, which in trees of axes means no leaf.

    Raises:
      ArgumentError: An axis is neither None nor a whole number from 0 on.
    """

    def sentinel(axis: Any) -> int:
        if axis is None:
            return WHOLE
        if isinstance(axis, bool) or not isinstance(axis, int) or axis < 0:
            raise ArgumentError(
                f"`{name}` must hold whole numbers from 0 on, or None, got {axis!r}. "
                "Leave it out for 0."
            )
        return axis

    axes = tuple(axes) if isinstance(axes, list) else axes
    return jax.tree.map(sentinel, axes, is_leaf=lambda axis: axis is None)


def with_axes(result: PyTree, out_axes: PyTree) -> PyTree:
    """Give the results of one replica their device axis, of length 1.

    Raises:
      ArgumentError: `out_axes` is not a prefix of them.
    """
    try:
        axes = jax.tree.broadcast(out_axes, result)
    except ValueError as failure:
        raise ArgumentError(
            "`out_axes` must be a prefix of the function's result, got "
            f"{out_axes} for {jax.tree.structure(result)}. Use 0 for all of it."
        ) from failure
    return jax.tree.map(
        lambda leaf, axis: (
            leaf if axis == WHOLE else jnp.expand_dims(jnp.asarray(leaf), axis)
        ),
        result,
        axes,
    )


def common_size(
    leaves: Sequence[Any], axes: Sequence[int], names: Callable[[], list[str]]
) -> int | None:
    """Return the length of the device axis; None if no leaf has one.

    Args:
      leaves: The arrays.
      axes: Device axis of each; `WHOLE` for none.
      names: Names of the leaves in errors.

    Raises:
      ArgumentError: They do not agree, or one lacks the axis.
    """
    mapped = [index for index, axis in enumerate(axes) if axis != WHOLE]
    sizes = [_length(leaves[index], axes[index]) for index in mapped]
    if not sizes:
        return None
    if None not in sizes and len(set(sizes)) == 1:
        return sizes[0]
    named = names()
    if None in sizes:
        odd = mapped[sizes.index(None)]
        rule = f"a device axis, axis {axes[odd]}"
    else:
        odd = next(i for i, size in zip(mapped, sizes, strict=True) if size != sizes[0])
        rule = f"{sizes[0]} rows along axis {axes[odd]}, as `{named[mapped[0]]}` has"
    raise ArgumentError(
        f"`{named[odd]}` must have {rule}, got shape {np.shape(leaves[odd])}. Give "
        "`in_axes` None to an argument that each device gets whole."
    )


def name_leaves(
    fn: Callable[..., PyTree],
    dynamic: Sequence[Any],
    kwargs: dict[str, Any],
    static: Sequence[int],
) -> list[str]:
    """Name the leaves of arguments as users know them: `params/dense/kernel`."""
    named: list[str] = []
    names = [name for i, name in enumerate(_parameters(fn)) if i not in static]
    for i, argument in enumerate(dynamic):
        own = names[i] if i < len(names) else f"argument {i}"
        flat, _ = jax.tree_util.tree_flatten_with_path(argument)
        named += ["/".join(filter(None, [own, leaf_path(path)])) for path, _ in flat]
    return named + [path for path, _ in named_leaves(kwargs)]


def _parameters(fn: Callable[..., PyTree]) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []  # some callables of C have none
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in parameters if each.kind in kinds]


def _length(leaf: Any, axis: int) -> int | None:
    shape = np.shape(leaf)
    return shape[axis] if len(shape) > axis else None
