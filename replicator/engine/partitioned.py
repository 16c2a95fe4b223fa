"""One replica on all devices: automatic `jit` over `replica`, `shard` and `model`.

The step sees the global batch, and XLA partitions it. A strategy's rule for a variable
holds where it is stored, where it is multiplied, and for its gradient;
`sharding_constraints` writes it into the step's program. No constraint changes a value:
a bad strategy costs time and memory, never the answer.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicator.base.mesh import partition_mesh, replicated
from replicator.base.padded import Padded, is_padded, pad_to, unpadded
from replicator.base.per_replica import is_per_replica
from replicator.base.trees import named_leaves
from replicator.base.types import Device, PyTree
from replicator.engine.layout import STATE, OneProcess, ProcessGroup, ValueKind
from replicator.engine.sharding_constraints.emit import Partitioned, reemit
from replicator.engine.sharding_constraints.one_replica import traced_alone
from replicator.engine.step.optimizer_state import OwnSums
from replicator.engine.step.state import RunState
from replicator.errors import ArgumentError
from replicator.strategies.builders import Builder
from replicator.strategies.rule import Cut
from replicator.strategies.strategy import Placement, Strategy, padded_shape
from replicator.strategies.variables import Variable, variables_of

_log = logging.getLogger(__name__)


class PartitionedLayout:
    """One replica over all devices; see `Layout` for attributes and methods.

    Args:
      strategy: A strategy that partitions, or a builder of one: it is called once, with
        the variables of the first state whose shardings are asked for.
      devices: Devices to choose from, those of one process side by side.
      processes: The processes that share them.

    Raises:
      ArgumentError: The strategy does not fit the devices.
    """

    num_replicas = 1

    def __init__(
        self,
        strategy: Strategy | Builder,
        devices: Sequence[Device],
        processes: ProcessGroup | None = None,
    ) -> None:
        self.processes = processes or OneProcess()
        self._given, self._devices = strategy, list(devices)
        self._chosen: _Chosen | None = None
        if isinstance(strategy, Strategy):
            self._chosen = _choose(strategy, self._devices)

    @property
    def strategy(self) -> Strategy:
        """The strategy, the builder's if there is one."""
        return self._known().strategy

    @property
    def mesh(self) -> Mesh:
        """The devices, along the axes of the strategy."""
        return self._known().mesh

    @property
    def batch_owners(self) -> Sequence[int]:
        """Process of each part of a batch."""
        return self._known().batch_owners

    def batch_shardings(self, shapes: PyTree, *, axis: int) -> PyTree:
        """Return one sharding for all leaves, over the strategy's axes of batches."""
        del shapes
        spec = PartitionSpec(*[None] * axis, self.strategy.batch_axes or None)
        return NamedSharding(self.mesh, spec)

    def pad_state(self, state: PyTree) -> PyTree:
        """Return a state with the leaves that its rules pad as `Padded`.

        Raises:
          ArgumentError: As `state_shardings`.
        """
        rules = self._chosen.strategy.rules if self._chosen else None
        if rules is not None and all(rule.uneven != "pad" for rule in rules):
            return unpadded(state)
        placements = self._placements(state)  # a builder's mesh is known after
        leaves, structure = jax.tree.flatten(state, is_leaf=is_padded)
        return structure.unflatten(
            _kept(leaf, padded_shape(np.shape(leaf), each.stored, self.mesh.shape))
            for leaf, each in zip(leaves, placements, strict=True)
        )

    def state_shardings(self, shapes: PyTree) -> list[NamedSharding]:
        """Return a sharding for each leaf of a state.

        Raises:
          ArgumentError: A leaf is declared `PerReplica`, or does not divide.
        """
        return [self._sharding(each.stored) for each in self._placements(shapes)]

    def check_state(self, shapes: PyTree) -> None:
        """Refuse a strategy that was not written for this state.

        Raises:
          ArgumentError: A rule matches nothing, or it was saved for other variables.
        """
        self.strategy.check_variables(variables_of(_user(shapes)))

    def spread(
        self, fn: Callable[..., Any], *, inputs: tuple[ValueKind, ...], outputs: PyTree
    ) -> Callable[..., Any]:
        """Return the one replica's program, with its constraints in it."""

        def program(*values: PyTree) -> PyTree:
            given = [
                self._lie(kind, unpadded(value) if kind == STATE else value)
                for kind, value in zip(inputs, values, strict=True)
            ]
            traced, shapes = traced_alone(fn, given)
            state = dict(zip(inputs, given, strict=True)).get(STATE)
            placed = self._placements(state)

            def wanted(kind: ValueKind, result: PyTree) -> list[Cut | None]:
                if kind == STATE and len(jax.tree.leaves(result)) == len(placed):
                    return [gradient_cut(each) for each in placed]
                return [None] * len(jax.tree.leaves(result))

            kinds, structure = jax.tree.flatten(outputs)
            targets = [
                cut
                for kind, result in zip(
                    kinds, structure.flatten_up_to(shapes), strict=True
                )
                for cut in wanted(kind, result)
            ]
            marks = [
                mark
                for kind, value in zip(inputs, given, strict=True)
                for mark in (
                    map(mark_of, placed)
                    if kind == STATE
                    else [None] * len(jax.tree.leaves(value))
                )
            ]
            found = reemit(
                traced,
                jax.tree.leaves(given),
                marks=marks,
                targets=targets,
                constrain=self._constrain,
                pieces=len(self.batch_owners),
                is_shared=len(self.batch_owners) < self.mesh.devices.size,
            )
            results = jax.tree.structure(shapes).unflatten(found)
            return jax.tree.map(self._give_back, outputs, results)

        return program

    def check(
        self, traced: core.Jaxpr, state: PyTree, batch: PyTree, *, batch_axis: int
    ) -> None:
        """Refuse a strategy that was not written for this state, as `check_state`.

        One replica cannot differ from itself, so there is nothing to prove; calls that
        are for many replicas are refused when the step makes them.
        """
        del traced, batch, batch_axis
        self.check_state(state)

    def describe(self) -> dict[str, Any]:
        """Return engine, mesh and strategy in plain JSON, for records."""
        return {
            "engine": "partitions",
            "mesh": dict(self.mesh.shape),
            **self.strategy.as_json(),
        }

    def _placements(self, state: PyTree) -> list[Placement]:
        """Return how each leaf of a state, or of a `RunState`, lies."""
        _refuse_own(state)
        variables = variables_of(_user(state))
        if self._chosen is None:
            built = _built(self._given, variables, self._devices)
            self._chosen = _choose(built, self._devices)
        sizes = dict(self.mesh.shape)
        placed = [self.strategy.place(each, sizes) for each in variables]
        if not isinstance(state, RunState):
            return placed
        # In the order of its fields: step and key, the user's, skipped.
        before = _whole((state.step, state.key))
        return [*before, *placed, *_whole(state.skipped)]

    def _known(self) -> "_Chosen":
        if self._chosen is None:
            raise ArgumentError(
                "`strategy` must have seen the variables of a state, got a function "
                "that has seen none. Make the state first: `rep.init(init_fn)`, or "
                "`rep.put(state)`."
            )
        return self._chosen

    def _sharding(self, cut: Cut) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*cut))

    def _constrain(self, leaf: jax.Array, cut: Cut) -> jax.Array:
        return jax.lax.with_sharding_constraint(leaf, self._sharding(cut))

    def _lie(self, kind: ValueKind, value: PyTree) -> PyTree:
        """Constrain an argument or a result of the program to its place."""
        if not jax.tree.leaves(value):
            return value
        if kind == STATE:
            where = self.state_shardings(value)
            leaves, structure = jax.tree.flatten(value)
            lying = jax.lax.with_sharding_constraint(leaves, where)
            return structure.unflatten(lying)
        if kind.name == "examples":
            where = self.batch_shardings(value, axis=kind.axis)
        else:
            where = replicated(self.mesh)
        return jax.lax.with_sharding_constraint(value, where)

    def _give_back(self, kind: ValueKind, result: PyTree) -> PyTree:
        if kind.name == "per_replica":
            result = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, kind.axis), result)
        if kind == STATE:
            result = self.pad_state(result)
        if kind.name == "examples":  # every process can read all
            kind = ValueKind("equal")
        return self._lie(kind, result)


class _Chosen(NamedTuple):
    """A strategy on its devices."""

    strategy: Strategy
    mesh: Mesh
    batch_owners: Sequence[int]


def _choose(strategy: Strategy, devices: Sequence[Device]) -> _Chosen:
    mesh = partition_mesh(strategy.sizes(len(devices)), devices)
    left_out = _processes(devices) - _processes(mesh.devices.flat)
    if left_out:
        raise ArgumentError(
            f"`strategy` must leave each process a device, got {strategy.name} on "
            f"{mesh.devices.size} and none in {min(left_out)}. Choose sizes "
            f"whose product is {len(devices)}."
        )
    if mesh.devices.size < len(devices):
        _log.warning(
            "`strategy` %s uses %d of %d devices; the others are idle.",
            *(strategy.name, mesh.devices.size, len(devices)),
        )
    return _Chosen(strategy, mesh, _owners(mesh, strategy.batch_axes))


def _built(
    given: Strategy | Builder,
    variables: tuple[Variable, ...],
    devices: Sequence[Device],
) -> Strategy:
    found = given(variables, devices) if callable(given) else given
    if not isinstance(found, Strategy):
        raise ArgumentError(
            f"`strategy` must return a `Strategy`, got {found!r}. Write "
            "`return Rules([...])`."
        )
    if found.kind != "partitions":
        raise ArgumentError(
            "`strategy` must return one that partitions where it is a function, got "
            f"{found.name}. For copies alone return `Rules([], replica=None)`."
        )
    # Its rules are for these variables: `check_state` refuses another model.
    return found if found.variables else found.made_for(variables)


def _kept(leaf: Any, shape: tuple[int, ...]) -> Any:
    """Return an array with padding up to `shape`, if it needs any."""
    if is_padded(leaf):
        if leaf.padded.shape == shape != leaf.shape:
            return leaf
        leaf = leaf.whole()
    if np.shape(leaf) == shape:
        return leaf
    return Padded(pad_to(leaf, shape), np.shape(leaf))


def _owners(mesh: Mesh, batch_axes: tuple[str, ...]) -> list[int]:
    """Return the process that reads each part of a batch, as this process sees it."""
    axes = [mesh.axis_names.index(axis) for axis in batch_axes]
    parts = np.moveaxis(mesh.devices, axes, range(len(axes)))
    parts = parts.reshape(math.prod(parts.shape[: len(axes)]), -1)
    holders = [_processes(part) for part in parts]
    if all(len(each) == 1 for each in holders):
        return [each.pop() for each in holders]
    # Processes share parts, along `model`: each reads all, and takes what it holds.
    return [jax.process_index()] * len(holders)


def _processes(devices: Iterable[Device]) -> set[int]:
    return {device.process_index for device in devices}


def refuse_own_sums(accumulate: int) -> None:
    """Refuse an optimizer that adds up gradients of each replica call by call.

    Raises:
      ArgumentError: Always: all devices are one replica.
    """
    raise ArgumentError(
        "`accumulate` must be 1 for an optimizer that is wrapped under a strategy that "
        f"partitions, got {accumulate}. Accumulate with "
        f"`rep.compile(step_fn, accumulate={accumulate})`."
    )


def _refuse_own(state: PyTree) -> None:
    """Refuse `PerReplica` leaves."""

    def is_own(node: PyTree) -> bool:
        return is_per_replica(node) or isinstance(node, OwnSums)

    for path, node in named_leaves(state, is_leaf=is_own):
        if isinstance(node, OwnSums):
            refuse_own_sums(node.every)
        if is_per_replica(node):
            raise ArgumentError(
                "`state` must hold no `PerReplica` leaf under a strategy that "
                f"partitions, got one at `{path}`: there is one replica. Keep a "
                "plain array, or use `strategies.data_parallel()`."
            )


def _user(state: PyTree) -> PyTree:
    return state.user if isinstance(state, RunState) else state


def _whole(tree: PyTree) -> list[Placement]:
    cuts = [(None,) * np.ndim(leaf) for leaf in jax.tree.leaves(tree)]
    return [Placement(stored=cut, computed=cut, gradient=cut) for cut in cuts]


def mark_of(placed: Placement) -> Partitioned | None:
    """Return the mark of a variable for `reemit`; None if it lies whole."""
    if not any(placed.stored) and not any(placed.computed):
        return None
    return Partitioned(stored=placed.stored, computed=placed.computed)


def gradient_cut(placed: Placement) -> Cut | None:
    """Return the target of a variable's gradient for `reemit`."""
    is_cut = any(placed.stored) or any(placed.gradient)
    return placed.gradient if is_cut else None
