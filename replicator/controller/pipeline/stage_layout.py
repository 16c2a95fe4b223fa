"""Lay a stage on its slice: a strategy, as the specs and constraints of its ops."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from replicator.base.types import PyTree
from replicator.controller.pipeline.parameters import homes_of
from replicator.controller.slices import Slice
from replicator.engine.sharding_constraints.emit import Marks, reemit
from replicator.engine.sharding_constraints.one_replica import traced_alone
from replicator.engine.sharding_constraints.targets import Targets
from replicator.errors import ArgumentError
from replicator.strategies.rule import Cut
from replicator.strategies.strategy import Strategy
from replicator.strategies.variables import variables_of

_WHOLE = Strategy(name="whole", batch_axes=())


class StageLayout:
    """A strategy on the slice of a stage.

    Args:
      on: The slice.
      strategy: The strategy; without one all arrays are whole on each device.

    Raises:
      ArgumentError: It does more than cut arrays, or is for other devices.

    Attributes:
      strategy: The strategy.
      sizes: Size of each of its axes.
      pieces: Number of pieces that examples are cut into.
    """

    def __init__(self, on: Slice, strategy: Strategy | None) -> None:
        self.strategy = _WHOLE if strategy is None else strategy
        _check(self.strategy)
        self._on, self._is_cut = on, len(on.places) > 1
        self.sizes = self.strategy.sizes(len(on.places))
        self.pieces = math.prod(self.sizes[axis] for axis in self.strategy.batch_axes)
        if strategy is not None and self._is_cut and dict(on.axes) != self.sizes:
            raise ArgumentError(
                f"`slices` must have the axes of the strategy of their stage, got {on} "
                f"with {dict(on.axes)} for {strategy.name}. Make it by "
                f"`pw.slice({len(on.places)}, axes={self.sizes})`."
            )

    def spec(self, cut: Sequence[Any]) -> PartitionSpec | None:
        """Return the spec of an array in an op; None on one device."""
        return PartitionSpec(*cut) if self._is_cut else None

    def examples(self, tree: PyTree) -> PyTree:
        """Return the specs of arrays of examples: cut, where they divide."""

        def spec(leaf: jax.Array) -> PartitionSpec | None:
            is_even = leaf.shape and leaf.shape[0] % self.pieces == 0
            return self.spec((self.strategy.batch_axes,) if is_even else ())

        return jax.tree.map(spec, tree)

    def run(
        self,
        fn: Callable[..., PyTree],
        arguments: tuple[PyTree, ...],
        *,
        marks: Marks = (),
        targets: Targets = (),
    ) -> PyTree:
        """Call a function on all devices, as on one.

        Args:
          fn: The function.
          arguments: Trees of arrays.
          marks: Of the first of these arrays: those that lie in pieces.
          targets: Of the first arrays of its results: cuts of gradients.
        """
        if not self._is_cut:
            return fn(*arguments)
        closed, shapes = traced_alone(fn, arguments)
        counts = len(closed.in_avals), len(closed.out_avals)

        def constrain(leaf: jax.Array, cut: Cut) -> jax.Array:
            sharding = NamedSharding(self._on.mesh, PartitionSpec(*cut))
            return jax.lax.with_sharding_constraint(leaf, sharding)

        found = reemit(
            closed,
            jax.tree.leaves(arguments),
            marks=[*marks, *[None] * (counts[0] - len(marks))],
            targets=[*targets, *[None] * (counts[1] - len(targets))],
            constrain=constrain,
            pieces=self.pieces,
            is_shared=self.pieces < len(self._on.places),
        )
        return jax.tree.unflatten(jax.tree.structure(shapes), found)


def layouts_of(
    strategy: Strategy | Sequence[Strategy | None] | None, slices: Sequence[Slice]
) -> list[StageLayout]:
    """Return the layout of each stage.

    Args:
      strategy: Of all stages, or of each.
      slices: Of each stage.

    Raises:
      ArgumentError: There are more or fewer, or a stage cannot have one.
    """
    if strategy is None or isinstance(strategy, Strategy):
        strategy = [strategy] * len(slices)
    if not isinstance(strategy, Sequence) or len(strategy) != len(slices):
        raise ArgumentError(
            f"`strategy` must be one for all, or one for each of the {len(slices)} "
            f"stages, got {strategy!r}. Write None for a stage whose arrays are whole."
        )
    return list(map(StageLayout, slices, strategy))


def placements(
    layouts: Sequence[StageLayout], params: Sequence[PyTree], optimizer: PyTree = ()
) -> tuple[list[PyTree], PyTree]:
    """Return how parameters and the optimizer's state lie, as trees of `Placement`.

    Args:
      layouts: Of each stage.
      params: Parameters of each stage, with those that it shares.
      optimizer: State of the optimizer.

    Raises:
      ArgumentError: A strategy is for other variables, or one does not divide.
    """
    state = {"params": list(params), "optimizer": optimizer}
    on = [layouts[home or 0] for home in homes_of(state, params)]
    variables = variables_of(state)
    for strategy in {layout.strategy for layout in on}:
        pairs = zip(variables, on, strict=True)
        strategy.check_variables(
            tuple(each for each, layout in pairs if layout.strategy == strategy)
        )
    placed = [
        layout.strategy.place(variable, layout.sizes)
        for variable, layout in zip(variables, on, strict=True)
    ]
    tree = jax.tree.unflatten(jax.tree.structure(state), placed)
    return tree["params"], tree["optimizer"]


def _check(strategy: Any) -> None:
    if not isinstance(strategy, Strategy):
        raise ArgumentError(
            f"`strategy` must be a strategy, got {strategy!r}. Call what builds it: "
            "`strategies.fsdp()`."
        )
    for rule in strategy.rules:
        if rule.synchronises or rule.uneven == "pad":
            what = rule.compress or rule.synchronise if rule.synchronises else "padding"
            raise ArgumentError(
                "`strategy` must cut the arrays of a stage and do no more, got "
                f"{strategy.name} with {what!r} for {rule.pattern!r}. Leave "
                '`synchronise`, `compress` and `uneven="pad"` out.'
            )
