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
from replicator.engine.sharding_constraints.targets import Targets
from replicator.errors import ArgumentError
from replicator.strategies.rule import Cut
from replicator.strategies.strategy import Placement, Strategy
from replicator.strategies.variables import Variable, variables_of

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
      pieces: Number of pieces that examples are cut into.
    """

    def __init__(self, on: Slice, strategy: Strategy | None) -> None:
        self.strategy = _WHOLE if strategy is None else strategy
        _check(self.strategy)
        self._on, self._is_cut = on, len(on.places) > 1
        self._sizes = self.strategy.sizes(len(on.places))
        self.pieces = math.prod(self._sizes[axis] for axis in self.strategy.batch_axes)
        if strategy is not None and self._is_cut and dict(on.axes) != self._sizes:
            raise ArgumentError(
                f"`slices` must have the axes of the strategy of their stage, got {on} "
                f"with {dict(on.axes)} for {strategy.name} with {self._sizes}. Make it "
                f"by `pw.slice({len(on.places)}, axes={self._sizes})`."
            )

    def place(self, variable: Variable) -> Placement:
        """Return how a variable lies."""
        return self.strategy.place(variable, self._sizes)

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
        fn: Callable[..., Sequence[jax.Array]],
        arrays: Sequence[jax.Array],
        *,
        marks: Marks,
        targets: Targets,
    ) -> Sequence[jax.Array]:
        """Run a function of flat arrays on all devices, as on one.

        Args:
          fn: The function.
          arrays: Its arguments.
          marks: Those that lie in pieces.
          targets: Cut of each result that is a gradient.
        """
        if not self._is_cut:
            return fn(*arrays)

        def constrain(leaf: jax.Array, cut: Cut) -> jax.Array:
            sharding = NamedSharding(self._on.mesh, PartitionSpec(*cut))
            return jax.lax.with_sharding_constraint(leaf, sharding)

        return reemit(
            jax.make_jaxpr(fn)(*arrays),
            arrays,
            marks=marks,
            targets=targets,
            constrain=constrain,
            pieces=self.pieces,
            is_shared=self.pieces < len(self._on.places),
        )


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
    layouts: Sequence[StageLayout], params: Sequence[PyTree], optimizer: PyTree
) -> dict[str, PyTree]:
    """Return how each variable lies: trees of `params` and `optimizer`.

    Args:
      layouts: Of each stage.
      params: Parameters of each stage, with those that it shares.
      optimizer: State of the optimizer.

    Raises:
      ArgumentError: A strategy is for other variables, or one does not divide.
    """
    state = {"params": params, "optimizer": optimizer}
    on = [layouts[home or 0] for home in homes_of(state, params)]
    variables = list(zip(variables_of(state), on, strict=True))
    for strategy in {layout.strategy for layout in layouts}:
        own = (each for each, layout in variables if layout.strategy == strategy)
        strategy.check_variables(tuple(own))
    placed = [layout.place(variable) for variable, layout in variables]
    return jax.tree.unflatten(jax.tree.structure(state), placed)


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
