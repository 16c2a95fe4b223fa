"""One update on one device: the standard for a partitioned program."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from replicator.base.flat_tree import whole
from replicator.base.padded import unpadded
from replicator.base.types import Device, PyTree
from replicator.engine.analysis.dataflow import find_equation
from replicator.engine.first_update.comparison import Compared, paths_and_groups
from replicator.engine.first_update.sensitivity import comparable
from replicator.engine.first_update.wide import narrowest, widened
from replicator.engine.memory import memory_limit_bytes, memory_need
from replicator.engine.sharded_step import Outputs, joined_metrics
from replicator.engine.sharding_constraints.one_replica import traced_alone
from replicator.engine.step.donation import copied
from replicator.engine.step.state import RunState

_NUDGES = 8
_ROUNDINGS = 8  # of an input: a sum of many numbers in another order is off by some


class NotChecked(Exception):
    """Raised with the reason why an update is not checked."""


class UpdateInputs(NamedTuple):
    """Inputs of an update, on the host: its state is donated."""

    state: PyTree
    batch: PyTree
    key: Any


def results_of(state: PyTree, metrics: PyTree) -> list:
    """Return the results that are compared, on the host: the user's state, metrics."""
    state = unpadded(whole(state))
    user = state.user if isinstance(state, RunState) else state
    return jax.tree.leaves(on_host((user, metrics)))


def on_host(tree: PyTree) -> PyTree:
    """Copy a tree: on a CPU an array of NumPy may share memory with a donated one."""

    def copy(leaf: Any) -> Any:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return copied(leaf) if is_key else np.array(leaf)

    return jax.tree.map(copy, tree)


class OneDevice:
    """An update on one device.

    Attributes:
      compared: Description of each of its results; None for one that is not compared.
      rounding: Rounding of its coarsest floats, if any is coarser than float32; else 0.

    Args:
      replica: Program of one replica.
      given: Inputs of the update.
      device: The device.

    Raises:
      NotChecked: The device cannot make it, or should not; or others would draw other
        random numbers.
    """

    def __init__(
        self, replica: Callable[..., Outputs], given: UpdateInputs, device: Device
    ) -> None:
        self._device = device
        self._programs: dict[bool, Any] = {}
        traced, outputs = _attempt(traced_alone, replica, given)
        if find_equation(traced.jaxpr, _draws_by_place):
            raise NotChecked("its random numbers depend on where they are drawn")
        if find_equation(traced.jaxpr, lambda eqn: eqn.primitive.name == "io_callback"):
            raise NotChecked("its host callbacks would run twice")
        self._traced, self._outputs = traced, jax.tree.structure(outputs)
        self.rounding = narrowest(traced.jaxpr, on_cpu=device.platform == "cpu")
        self.compared = compared_results(traced, outputs, given)

    def results(self, given: UpdateInputs, *, wide: bool = False) -> list:
        """Return the state and the metrics after an update.

        Args:
          given: Inputs of the update.
          wide: Whether to compute in float32 at the highest precision.

        Raises:
          NotChecked: The device cannot, or has not the memory.
        """
        leaves = _attempt(jax.device_put, jax.tree.leaves(given), self._device)
        if wide not in self._programs:
            traced = self._traced
            fn = widened(traced) if wide else core.jaxpr_as_fun(traced)
            lowered = _attempt(jax.jit(fn).lower, *leaves)
            self._programs[wide] = _attempt(lowered.compile)
            self._require_memory(self._programs[wide])
        outputs = self._outputs.unflatten(_attempt(self._programs[wide], *leaves))
        return results_of(outputs.state, joined_metrics(outputs))

    def others(self, given: UpdateInputs) -> Iterator[list]:
        """Yield results that differ as they may with other roundings.

        In wider floats, if there are coarse ones; and from an input that is moved by
        some roundings: that shows results that a rounding decides.

        Args:
          given: Inputs of the update.

        Raises:
          NotChecked: As `results`.
        """
        if self.rounding:
            yield self.results(given, wide=True)
        for seed in range(_NUDGES):
            state, batch = nudged((given.state, given.batch), seed)
            found = self.results(UpdateInputs(state, batch, given.key))
            pairs = zip(results_of(given.state, ()), results_of(state, ()), strict=True)
            for number, (old, new) in enumerate(pairs):
                each = self.compared[number]
                if each is not None and each.moves:  # it counts by how far it moved
                    found[number] = (found[number] - (new - old)).astype(old.dtype)
            yield found

    def _require_memory(self, program: jax.stages.Compiled) -> None:
        need, limit = memory_need(program), memory_limit_bytes([self._device])
        if need is None or limit is None:
            return
        used = (self._device.memory_stats() or {}).get("bytes_in_use", 0)
        if need.total_bytes - need.arguments_bytes > limit - used:
            raise NotChecked(f"one device would need {need.describe()}")


def compared_results(
    traced: core.ClosedJaxpr, outputs: Outputs, given: UpdateInputs
) -> list[Compared | None]:
    """Describe each result of an update; None for one that is not compared.

    Args:
      traced: Program of one replica.
      outputs: Shapes of its results.
      given: Its inputs.
    """
    user = [True] * len(jax.tree.leaves(given[:2]))
    user += [False] * len(jax.tree.leaves(given.key))
    compared, moves = comparable(traced.jaxpr, user)
    marks = [a + 2 * b for a, b in zip(compared, moves, strict=True)]
    marked = _looked_at(jax.tree.structure(outputs).unflatten(marks))
    names = paths_and_groups(*_looked_at(outputs))
    return [
        Compared(*name, moves=mark == 3) if mark % 2 else None
        for name, mark in zip(names, jax.tree.leaves(marked), strict=True)
    ]


def nudged(tree: PyTree, seed: int) -> PyTree:
    """Move floats by some roundings, but for whole numbers: those count and mask.

    >>> float(nudged({"x": np.float32(1.5)}, 0)["x"]) != 1.5
    True
    """
    draw = np.random.default_rng(seed)

    def move(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        size = _ROUNDINGS * min(jnp.finfo(leaf.dtype).eps, jnp.finfo(jnp.float32).eps)
        moved = leaf * (1 + float(size) * draw.choice((-1.0, 1.0), leaf.shape))
        return np.where(leaf == np.round(leaf), leaf, moved).astype(leaf.dtype)

    return jax.tree.map(move, tree)


def _looked_at(outputs: Outputs) -> tuple[PyTree, PyTree]:
    state = outputs.state
    user = state.user if isinstance(state, RunState) else state
    return user, joined_metrics(outputs)


def _draws_by_place(eqn: core.JaxprEqn) -> bool:
    """Return whether XLA draws random numbers: other devices draw others."""
    name = eqn.primitive.name
    if name in ("random_bits", "random_gamma"):
        return "rbg" in str(getattr(eqn.invars[0].aval, "dtype", ""))
    return name in ("rng_bit_generator", "rng_uniform")


def _attempt(act: Callable[..., Any], *args: Any) -> Any:
    """Call a function that one device may not be able to run."""
    try:
        return jax.block_until_ready(act(*args))
    except Exception as failure:
        first = str(failure).partition("\n")[0][:200]
        raise NotChecked(f"one device cannot run it: {first}") from failure
