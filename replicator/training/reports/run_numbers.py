"""Add the costs of a run to each row: utilisation, memory, programs, time by phase.

A writer around another. Utilisation is in every row that holds a rate, memory and time
by phase at most once a second, a program's numbers once for each compilation: so most
rows cost a multiplication.
"""

from collections.abc import Callable, Mapping, Sequence

import jax

from replicator.base.types import Device
from replicator.engine.program_cost import Compilation
from replicator.monitoring.device_memory import memory_numbers
from replicator.monitoring.phases import Phases
from replicator.strategies.hardware import flops_utilisation, peak_flops_per_s
from replicator.writers.writer import Writer

_INTERVAL_S = 1.0


class AddRunNumbers:
    """Pass rows to `writer`, with the run's own numbers in them.

    They are `progress/mfu` (model-flops utilisation), `memory/...` in bytes,
    `goodput/<phase>` as shares of this process's time, `compile/count` and
    `compile/seconds` so far, and of the newest program `program/flops` (all devices),
    `program/collective_bytes` and `program/memory_bytes` (one device), for one step.

    Args:
      writer: Writer of the rows.
      phases: Phases of the run.
      compilations: Returns the step's compilations so far.
      devices: Devices of the run, in all processes.
      peak_flops_per_s: Peak of one device; known for TPUs and common GPUs. Without it
        there is no `progress/mfu`.
    """

    def __init__(
        self,
        writer: Writer,
        phases: Phases,
        *,
        compilations: Callable[[], Sequence[Compilation]],
        devices: Sequence[Device],
        peak_flops_per_s: float | None = None,
    ):
        self._writer = writer
        self._phases = phases
        self._compilations = compilations
        self._num_devices = len(devices)
        here = jax.process_index()
        self._local_devices = [each for each in devices if each.process_index == here]
        self._peak_flops_per_s = peak_flops_per_s or _peak(devices)
        self._looked_s: float | None = None
        self._written_compilations = 0

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write a row with the run's numbers."""
        row = dict(scalars)
        compiled = self._compilations()
        if compiled:
            row |= self._utilisation(compiled[-1], scalars)
        if len(compiled) != self._written_compilations:
            self._written_compilations = len(compiled)
            row |= _compile_numbers(compiled)
        if self._is_time_to_look():
            row |= memory_numbers(self._local_devices) | self._shares()
        self._writer.write(step, row)

    def flush(self) -> None:
        """Flush the writer."""
        self._writer.flush()

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()

    def _utilisation(
        self, newest: Compilation, scalars: Mapping[str, float]
    ) -> dict[str, float]:
        steps_per_s = scalars.get("progress/steps_per_s")
        if steps_per_s is None or self._peak_flops_per_s is None:
            return {}
        share = flops_utilisation(
            newest.per_step()["flops"],
            steps_per_s=steps_per_s,
            peak_flops_per_s=self._peak_flops_per_s,
            devices=self._num_devices,
        )
        return {"progress/mfu": share}

    def _is_time_to_look(self) -> bool:
        now_s = self._phases.clock.now_s()
        if self._looked_s is not None and now_s - self._looked_s < _INTERVAL_S:
            return False
        self._looked_s = now_s
        return True

    def _shares(self) -> dict[str, float]:
        seconds = self._phases.seconds()
        total_s = sum(seconds.values())
        return {
            f"goodput/{phase}": spent_s / total_s
            for phase, spent_s in seconds.items()
            if spent_s > 0
        }


def _peak(devices: Sequence[Device]) -> float | None:
    kinds = {device.device_kind for device in devices}
    return peak_flops_per_s(kinds.pop()) if len(kinds) == 1 else None


def _compile_numbers(compiled: Sequence[Compilation]) -> dict[str, float]:
    numbers = {
        f"program/{name}": cost for name, cost in compiled[-1].per_step().items()
    }
    return numbers | {
        "compile/count": len(compiled),
        "compile/seconds": sum(each.seconds for each in compiled),
    }
