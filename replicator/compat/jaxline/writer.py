"""The writer that an experiment is handed, over one of ours."""

from collections.abc import Mapping
from typing import Any

import jax

from replicator.monitoring.writers.writer import Writer, named_numbers


class ScalarWriter:
    """Offers jaxline's `write_scalars`.

    Args:
      writer: Where to; None for nowhere.
    """

    def __init__(self, writer: Writer | None) -> None:
        self._writer = writer

    def write_scalars(self, global_step: Any, scalars: Mapping[str, Any]) -> None:
        """Write numbers, of which a step may have several rows."""
        if self._writer is not None:
            numbers = named_numbers(jax.device_get(dict(scalars)))
            self._writer.write(int(global_step), numbers)


class WithoutExamples:
    """Leaves out rates of examples: an experiment reads its own input.

    Args:
      writer: Where the rest goes.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.flush = writer.flush
        self.close = writer.close

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the numbers that mean something."""
        unknown = ("progress/examples_per_s", "progress/input_stall_share")
        self._writer.write(
            step, {name: n for name, n in scalars.items() if name not in unknown}
        )
