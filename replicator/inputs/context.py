"""Tell an input function which part of the global batch it must yield.

A pipeline is one call of the input function. One process reads with one pipeline, or
with one for each of its replicas. Where the whole run has one (`single`, and every
dataset that is no function), each process reads it all and uses its own rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import jax
from jax.sharding import Mesh

from replicator.base.types import PyTree
from replicator.errors import ArgumentError
from replicator.inputs.checks import nearest_multiples

InputMode: TypeAlias = Literal["single", "per_host", "per_replica"]
"""Who has a pipeline: the whole run, every process, or every replica."""


class BatchLayout(Protocol):
    """How global batches lie on devices: what inputs need of an engine's `Layout`."""

    @property
    def mesh(self) -> Mesh:
        """The devices, those of other processes too."""
        ...

    @property
    def num_replicas(self) -> int:
        """Number of replicas that share a global batch."""
        ...

    @property
    def batch_owners(self) -> Sequence[int]:
        """Process of each equal part of a global batch, in the order of examples.

        Where several processes hold one part, each takes all parts for its own, and
        reads the whole batch.
        """
        ...

    def batch_shardings(self, shapes: PyTree, *, axis: int) -> PyTree:
        """Return shardings, a prefix of `shapes`, that cut array axis `axis`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InputContext:
    """What one pipeline is told when its input function is called.

    Attributes:
      pipeline_index: Which pipeline this is, from 0.
      num_pipelines: How many pipelines make up the global batch.
      num_replicas: How many replicas share the global batch.
    """

    pipeline_index: int
    num_pipelines: int
    num_replicas: int

    def batch_size(self, global_batch: int) -> int:
        """Return how many examples of each global batch this pipeline must yield.

        Args:
          global_batch: Examples in one update over all pipelines.

        Returns:
          `global_batch / num_pipelines`.

        Raises:
          ArgumentError: It does not divide evenly.

        >>> context = InputContext(pipeline_index=0, num_pipelines=4, num_replicas=8)
        >>> context.batch_size(96)
        24
        """
        if global_batch < 1 or global_batch % self.num_pipelines:
            raise ArgumentError(
                f"`global_batch` must divide evenly over {self.num_pipelines} "
                f"pipelines, got {global_batch}. "
                f"Use {nearest_multiples(global_batch, self.num_pipelines)}."
            )
        return global_batch // self.num_pipelines


def name_of_parts(layout: BatchLayout) -> str:
    """Return what a global batch is shared by, in the plural, for errors."""
    parts = len(layout.batch_owners)
    if parts == layout.num_replicas:
        return "replicas"
    return "devices" if parts == layout.mesh.devices.size else "groups of devices"


def parts_to_read(layout: BatchLayout, *, whole: bool) -> int:
    """Return how many parts of each global batch this process reads.

    Args:
      layout: How batches lie on devices.
      whole: Whether each process reads all of it, or only the parts that it holds.
    """
    owners = layout.batch_owners
    return len(owners) if whole else owners.count(jax.process_index())


def pipeline_contexts(
    mode: InputMode, layout: BatchLayout, *, by_function: bool = True
) -> list[InputContext]:
    """List the pipelines that this process reads, in the order of their examples.

    A dataset that is no input function cannot be told which part to yield: each process
    reads all of it, and takes its own rows.

    Args:
      mode: Who has a pipeline.
      layout: How batches lie on devices.
      by_function: Whether the dataset is an input function.

    Raises:
      ArgumentError: Processes with unlike numbers of replicas cannot yield like parts.
    """
    here = jax.process_index()
    owners = layout.batch_owners
    # One replica has one pipeline, on however many devices it lies.
    if mode == "per_replica" and layout.num_replicas > 1:
        return [
            InputContext(
                pipeline_index=part,
                num_pipelines=len(owners),
                num_replicas=layout.num_replicas,
            )
            for part, owner in enumerate(owners)
            if owner == here
        ]
    processes = sorted(set(owners))
    if mode != "per_host" or not by_function:
        processes = [here]
    counts = [owners.count(process) for process in processes]
    if len(processes) > 1 and len(set(counts)) > 1:
        raise ArgumentError(
            "`mode` must be 'single' or 'per_replica' where processes hold unlike "
            f"numbers of replicas, got 'per_host' for {counts}. Use 'per_replica'."
        )
    return [
        InputContext(
            pipeline_index=processes.index(here),
            num_pipelines=len(processes),
            num_replicas=layout.num_replicas,
        )
    ]
