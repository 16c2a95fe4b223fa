"""Shared names of types of users' data and functions."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""Any JAX pytree. The one place where `Any` stands for a user's data."""

Key: TypeAlias = Any
"""A scalar JAX random key."""

StepFn: TypeAlias = Callable[..., tuple[PyTree, PyTree]]
"""`step_fn(state, batch[, key]) -> (state, metrics)`: the step of one replica."""

Device: TypeAlias = Any
"""A `jax.Device`, which type checkers take for a variable."""

InitFn: TypeAlias = Callable[..., PyTree]
"""`init_fn(key) -> state`: any pytree of arrays."""

Dataset: TypeAlias = Iterable[PyTree] | Callable[..., Any]
"""An iterable of global batches, or `input_fn(context)` that returns one."""
