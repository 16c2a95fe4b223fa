"""The context of an input function: the part of the global batch that it yields.

A pipeline is one call of the input function. One process reads with one pipeline, or
with one for each of its replicas. If the whole run has one (`single`, and every dataset
that is not a function), each process reads all of it and uses its own rows.
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
"""Scope of a pipeline: the whole run, every process, or every replica."""


class BatchLayout(Protocol):
    """Layout of global batches on devices: the part of `Layout` that inputs use."""

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

        If several processes hold one part, each counts all parts as its own, and reads
        the whole batch.
        """
        ...

    def batch_shardings(self, shapes: PyTree, *, axis: int) -> PyTree:
        """Return shardings, a prefix of `shapes`, that cut array axis `axis`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InputContext:
    """Argument of an input function: the pipeline that it is called for.

    Attributes:
      pipeline_index: Index of the pipeline, from 0.
      num_pipelines: Number of pipelines that make up the global batch.
      num_replicas: Number of replicas that share the global batch.
    """

    pipeline_index: int
    num_pipelines: int
    num_replicas: int

    def batch_size(self, global_batch: int) -> int:
        """Return the number of examples of each global batch that this pipeline yields.

        Args:
          global_batch: Examples of one update, over all pipelines.

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
    """Return the name of the sharers of a global batch, in the plural, for errors.

    >>> name_of_parts(rep.layout)
    'replicas'
    """
    parts = len(layout.batch_owners)
    if parts == layout.num_replicas:
        return "replicas"
    return "devices" if parts == layout.mesh.devices.size else "groups of devices"


def parts_to_read(layout: BatchLayout, *, whole: bool) -> int:
    """Return the number of parts of each global batch that this process reads.

    >>> parts_to_read(rep.layout, whole=True)
    8

    Args:
      layout: Layout of batches on devices.
      whole: Whether each process reads all parts, or only those that it holds.
    """
    owners = layout.batch_owners
    return len(owners) if whole else owners.count(jax.process_index())


def pipeline_contexts(
    mode: InputMode, layout: BatchLayout, *, by_function: bool = True
) -> list[InputContext]:
    """List the pipelines that this process reads, in the order of their examples.

    A dataset that is not an input function cannot yield a part: each process reads all
    of it, and takes its own rows.

    >>> [one.num_pipelines for one in pipeline_contexts("per_host", rep.layout)]
    [1]

    Args:
      mode: Scope of a pipeline.
      layout: Layout of batches on devices.
      by_function: Whether the dataset is an input function.

    Raises:
      ArgumentError: Processes with different numbers of replicas cannot yield equal
        parts.
    """
    here = jax.process_index()
    owners = layout.batch_owners
    # One replica has one pipeline, on any number of devices.
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
