"""Memory that a step needs of each device, and settings that make it fit.

XLA reports the size of one buffer, which does not help a user. A compiled program knows
what it needs of each device: arguments (state, batch), results, and temporaries, which
accumulation makes smaller.
"""

import dataclasses
import math
import re
from collections.abc import Iterable

import jax

from replicator.base.out_of_memory import readable
from replicator.base.types import Device, PyTree
from replicator.errors import DeviceMemoryError

_ASKED_FOR = re.compile(r"(?:allocat\w*|requested)\D{0,20}(\d+)\s*(?:bytes|B)\b")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """Memory that a compiled program needs of each device, in bytes.

    Attributes:
      arguments_bytes: Size of state, batch and keys.
      outputs_bytes: Size of the new state and the metrics.
      temporaries_bytes: Size of temporaries; accumulation makes it smaller.
      aliased_bytes: Size of outputs that reuse donated arguments: counted once.
      program_bytes: Size of the program itself.
      copy_bytes: Size of the copies of the state that saves make beside it.
      peak_bytes: The compiler's own figure of the peak, without copies of saves; 0 if
        it has none. `total_bytes` may be above it: parts that are not needed at the
        same time share memory.
    """

    arguments_bytes: int
    outputs_bytes: int
    temporaries_bytes: int
    aliased_bytes: int = 0
    program_bytes: int = 0
    copy_bytes: int = 0
    peak_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Memory at the peak."""
        kept = self.arguments_bytes + self.outputs_bytes - self.aliased_bytes
        beside = self.program_bytes + self.copy_bytes
        return kept + self.temporaries_bytes + beside

    def describe(self) -> str:
        """Return a text for an error: "3.1 GiB (temporaries 2.0 GiB, ...)"."""
        parts = {
            "temporaries": self.temporaries_bytes,
            "state and batch": self.arguments_bytes,
            "results": self.outputs_bytes - self.aliased_bytes,
            "program": self.program_bytes,
            "copy of the state in a save": self.copy_bytes,
        }
        named = [f"{name} {readable(size)}" for name, size in parts.items() if size > 0]
        return f"{readable(self.total_bytes)} ({', '.join(named)})"


def memory_need(
    compiled: jax.stages.Compiled, copy_bytes: int = 0
) -> MemoryNeed | None:
    """Return what a compiled program needs; None if the backend does not report it.

    Args:
      compiled: The program.
      copy_bytes: Size of the copy of its state that a save makes; 0 for none.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return MemoryNeed(
        arguments_bytes=stats.argument_size_in_bytes,
        outputs_bytes=stats.output_size_in_bytes,
        temporaries_bytes=stats.temp_size_in_bytes,
        aliased_bytes=stats.alias_size_in_bytes,
        program_bytes=stats.generated_code_size_in_bytes,
        copy_bytes=copy_bytes,
        peak_bytes=getattr(stats, "peak_memory_in_bytes", 0),
    )


def state_bytes(state: PyTree) -> int:
    """Return the bytes of a state on one device: the most that a copy of it takes.

    Args:
      state: Arrays, or shapes with shardings.

    >>> state_bytes({"w": jnp.zeros((8, 2), jnp.float32)})
    64
    """
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )


def memory_limit_bytes(devices: Iterable[Device]) -> int | None:
    """Return the memory of the smallest of `devices`; None if they do not report it."""
    stats = [device.memory_stats() or {} for device in devices]
    limits = [each["bytes_limit"] for each in stats if "bytes_limit" in each]
    return min(limits, default=None)


def out_of_memory(
    failure: BaseException,
    *,
    need: MemoryNeed | None,
    limit_bytes: int | None,
    accumulate: int,
    replica_batch: int,
) -> DeviceMemoryError:
    """Return the error to raise from XLA's own.

    Args:
      failure: The error of XLA.
      need: Memory that the program needs; None if it was not compiled.
      limit_bytes: Memory of a device, if known.
      accumulate: Number of microbatches per update, so far.
      replica_batch: Number of examples of one replica in a global batch.

    Returns:
      An error with the memory needed, and values of `accumulate` that may help.
    """
    needed = need.describe() if need is not None else _asked_for(failure)
    there = f" and there are {readable(limit_bytes)}" if limit_bytes is not None else ""
    return DeviceMemoryError(
        "`accumulate` must make the step fit into each device's memory, got "
        f"{accumulate}: it needs {needed}{there}. "
        f"{_remedy(need, limit_bytes, accumulate, replica_batch)}{_without_copy(need)}"
    )


def larger_divisors(replica_batch: int, accumulate: int) -> list[int]:
    """List larger numbers of microbatches that divide a replica's batch.

    >>> larger_divisors(12, 2)
    [3, 4, 6, 12]
    """
    return [
        k for k in range(accumulate + 1, replica_batch + 1) if replica_batch % k == 0
    ]


def _asked_for(failure: BaseException) -> str:
    found = _ASKED_FOR.search(str(failure))
    if found is None:
        return "more than there is"
    return f"a buffer of {readable(int(found[1]))} more than there is"


def _remedy(
    need: MemoryNeed | None,
    limit_bytes: int | None,
    accumulate: int,
    replica_batch: int,
) -> str:
    choices = larger_divisors(replica_batch, accumulate)
    if need is not None and limit_bytes is not None:
        choices = [k for k in choices if may_fit(need, limit_bytes, k / accumulate)]
    if not choices:
        return "Use a smaller global batch, a smaller model or more replicas."
    *first, last = [f"`accumulate={k}`" for k in choices[:3]]
    listed = f"{', '.join(first)} or {last}" if first else last
    return f"Use {listed}, or let `auto_microbatch=True` find one."


def _without_copy(need: MemoryNeed | None) -> str:
    if need is None or not need.copy_bytes:
        return ""
    freed = readable(need.copy_bytes)
    return f' `checkpoint_copy="host"` needs {freed} less.'


def may_fit(need: MemoryNeed, limit_bytes: float, smaller: float) -> bool:
    """Guess: temporaries shrink with the microbatch; up to a half may not shrink.

    >>> need = MemoryNeed(arguments_bytes=0, outputs_bytes=0, temporaries_bytes=100)
    >>> may_fit(need, 80, 2), may_fit(need, 60, 2)
    (True, False)
    """
    shrunk = need.temporaries_bytes * (0.5 + 0.5 / smaller)
    return need.total_bytes - need.temporaries_bytes + shrunk <= limit_bytes
