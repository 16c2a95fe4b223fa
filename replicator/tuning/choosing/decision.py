"""The layout of a `Replicator`: given by its strategy, or decided later (`"auto"`)."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import Mesh

from replicator.distributed import same_everywhere
from replicator.distributed.given_machine import find_machine
from replicator.engine import make_step
from replicator.engine.layout import Layout
from replicator.engine.step.optimizer_state import Reduction
from replicator.errors import ArgumentError
from replicator.strategies.builders import Builder
from replicator.strategies.machine import Machine
from replicator.strategies.strategy import Strategy

AUTO = "auto"


class Decision:
    """The layout of a `Replicator`, once there is one.

    Attributes:
      devices: Its devices, as replicas.
      reduction: How gradients add up.
      machine: Where its devices are; None if nothing describes that.
      record: What was chosen, by what, in plain JSON; None where nothing was.

    Args:
      devices: Its devices, as replicas; None in another process.
      strategy: As `Replicator` takes it.
      reduction: How gradients add up.
      machine: As `Replicator` takes it.

    Raises:
      ArgumentError: As `make_layout` and `find_machine`; or an order of sums is asked
        for with `"auto"`.
    """

    def __init__(
        self,
        devices: Mesh | None,
        strategy: Strategy | Builder | str | None,
        reduction: Reduction,
        *,
        machine: Machine | str | os.PathLike[str] | None = None,
    ) -> None:
        self.devices = devices
        self.machine: Machine | None = None
        if devices is not None:
            self.machine = find_machine(machine, devices.devices.size)
        self.reduction: Reduction = reduction
        self.record: Mapping[str, Any] | None = None
        self._layout: Layout | None = None
        if strategy != AUTO:
            self._layout = self._made(strategy)
        elif reduction == "ordered":
            raise ArgumentError(
                '`reduction` must be "fast" with `strategy="auto"`, got "ordered". '
                "Leave one of them out."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # Optimizers of a step refer to it; devices stay in their process.
        return Decision, (None, AUTO, "fast")

    @property
    def is_made(self) -> bool:
        """Whether there is a layout."""
        return self._layout is not None

    @property
    def layout(self) -> Layout:
        """The layout.

        Raises:
          ArgumentError: It is not decided yet.
        """
        if self._layout is None:
            raise ArgumentError(
                '`strategy` must be decided for this, got "auto" before a run began. '
                "Use `replicator.choose(step_fn, init_fn, batch).replicator`."
            )
        return self._layout

    def rules(self) -> Strategy | None:
        """Return the strategy by whose rules replicas add up gradients, if any."""
        return None if self._layout is None else make_step.rules_of(self._layout)

    def check_own_sums(self, accumulate: int) -> None:
        """Refuse an optimizer that adds up by itself, where all devices are one.

        Raises:
          ArgumentError: It is one.
        """
        if self._layout is not None:
            make_step.check_own_sums(self._layout, accumulate)

    def make(self, strategy: Strategy, record: Mapping[str, Any]) -> None:
        """Decide for a strategy.

        Args:
          strategy: The strategy.
          record: What was chosen, by what, in plain JSON.

        Raises:
          ArgumentError: It does not fit the devices.
        """
        self._layout, self.record = self._made(strategy), record

    @contextlib.contextmanager
    def under(self, layout: Layout) -> Iterator[None]:
        """Have optimizers take the rules of a layout that is tried, in a `with`."""
        before, self._layout = self._layout, layout
        try:
            yield
        finally:
            self._layout = before

    def _made(self, strategy: Strategy | Builder | str | None) -> Layout:
        assert self.devices is not None, "made where the devices are"
        return make_step.make_layout(
            self.devices,
            strategy,
            reduction=self.reduction,
            processes=same_everywhere,
            machine=self.machine,
        )
