"""Open a dataset of any kind: batches on the mesh, read ahead."""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from replicator.base.host.clock import Clock
from replicator.base.types import Dataset, PyTree
from replicator.errors import ArgumentError, check_kind
from replicator.inputs import context
from replicator.inputs.adapters import Source, is_input_fn, open_sources
from replicator.inputs.options import (
    DEFAULT_PREFETCH,
    InputOptions,
    refuse_shapes,
    small_prefetch,
)
from replicator.inputs.placement import BatchPlacer, Placed, stack_batches
from replicator.inputs.position import Position
from replicator.inputs.prefetch import Prefetcher
from replicator.inputs.remainder import MASK, HostBatch, full_mask
from replicator.inputs.rounds import host_batches
from replicator.inputs.synchronized_reads import read_sync_over


def open_input(
    dataset: Dataset,
    layout: context.BatchLayout,
    *,
    options: InputOptions | None = None,
    start: Position | None = None,
    clock: Clock | None = None,
    is_over: Callable[[], bool] | None = None,
    unasked: int | None = None,
) -> Prefetcher[Placed]:
    """Read a dataset in the background, check it, and place it on devices.

    A dataset that can be iterated again repeats, epoch after epoch, as long as
    `options` allow. An iterator, or a callable that yields a batch per call, is read
    once. Close the result, or use it in a `with` block. If replicas are spread over
    processes, all of them open the same inputs in the same order, and end together.

    Args:
      dataset: An iterable of batches (a list, a generator, anything of grain, a PyTorch
        `DataLoader`, a `tf.data.Dataset`); a callable without arguments that yields a
        batch per call; or `input_fn(context)` that returns any of these. A batch is a
        pytree of arrays [batch, ...].
      layout: Layout of batches on devices.
      options: Options of reading; `InputOptions()` if None. Its `epochs` count from the
        beginning, its `steps` from `start`.
      start: Position to begin at: the `position` of the last batch that was used.
      clock: Clock of waiting times; the system's if None.
      is_over: Called while a batch is waited for; True ends the input.
      unasked: Number of results to read ahead, at least 1; each later one is read when
        it is waited for. None reads all ahead.

    Returns:
      An iterator of `Placed` that raises the errors of reading.

    Raises:
      ArgumentError: `dataset` cannot be read in this mode, or not that often.

    >>> import numpy as np
    >>> import replicator
    >>> rep = replicator.Replicator(num_replicas=1)
    >>> with open_input([{"x": np.zeros((8, 2))}], rep.layout) as batches:
    ...     next(batches).examples
    8
    """
    check_kind("options", options, InputOptions)
    check_kind("start", start, Position)
    options = options or InputOptions()
    contexts = context.pipeline_contexts(
        options.mode, layout, by_function=is_input_fn(dataset, options.adapters)
    )
    if contexts[0].num_pipelines > 1:
        refuse_shapes(options, "where several pipelines read")
    sources = open_sources(dataset, contexts, adapters=options.adapters)
    once = not all(source.repeats for source in sources)
    if once and (options.epochs or 1) > 1:
        raise ArgumentError(
            "`epochs` must be 1 for an iterator, which can be read once, got "
            f"{options.epochs}. Pass an iterable that starts anew, like a list."
        )
    return Prefetcher(
        placed_batches(sources, contexts, layout, options, start=start),
        size=options.prefetch or (DEFAULT_PREFETCH if once else _small_prefetch),
        timeout_s=options.timeout_s,
        clock=clock,
        is_over=is_over,
        unasked=unasked,
    )


def _small_prefetch(first: Placed) -> int:
    return small_prefetch(sum(leaf.nbytes for leaf in jax.tree.leaves(first.value)))


def placed_batches(
    sources: Sequence[Source],
    contexts: Sequence[context.InputContext],
    layout: context.BatchLayout,
    options: InputOptions,
    *,
    start: Position | None = None,
    blocks: int | None = None,
) -> Generator[Placed, None, None]:
    """Yield batches on their devices.

    Args:
      sources: Sources of the pipelines of this process.
      contexts: Contexts of these pipelines.
      layout: Layout of batches on devices.
      options: Options of reading.
      start: Position to begin at; the first batch if None.
      blocks: Number of equal blocks that each batch is cut into, each cut over devices;
        that of microbatches if None.
    """
    count = contexts[0].num_pipelines
    once = not all(source.repeats for source in sources)
    batches = host_batches(
        sources,
        parts=context.parts_to_read(layout, whole=count == 1),
        kind=context.name_of_parts(layout),
        options=options,
        start=start
        and start.of_pipelines([each.pipeline_index for each in contexts], count),
        in_step=read_sync_over(layout.mesh, num_pipelines=count, once=once),
    )
    cut = options.accumulate if blocks is None else blocks
    place = _Place(
        BatchPlacer(layout, cut, options.steps_per_call, whole=count == 1), options
    )
    with contextlib.closing(batches):
        limited = itertools.islice(batches, options.steps)
        for group in _groups(limited, options.steps_per_call):
            yield place(group)


def _groups(
    batches: Iterable[HostBatch], steps_per_call: int
) -> Iterator[list[HostBatch]]:
    """Yield runs of consecutive batches; the last may be shorter."""
    batches = iter(batches)
    while group := list(itertools.islice(batches, steps_per_call)):
        yield group


class _Place:
    """Puts groups of host batches on their devices."""

    def __init__(self, placement: BatchPlacer, options: InputOptions) -> None:
        self._options = options
        self._placement = placement
        self._masks: dict[tuple[int, int], jax.Array] = {}

    def __call__(self, group: Sequence[HostBatch]) -> Placed:
        return Placed(
            value=self._put([batch.value for batch in group]),
            examples=sum(batch.examples for batch in group),
            padded=any(batch.padded for batch in group),
            index=group[0].position.batches - 1,
            steps=len(group),
            is_stated=bool(self._options.shapes),
            accumulate=self._options.accumulate,
            steps_per_call=self._options.steps_per_call,
            position=group[-1].position,
        )

    def _put(self, values: Sequence[PyTree]) -> PyTree:
        """Put the batches of a call; the mask of full ones is put once and shared."""
        masks: list[Any] = [
            value.get(MASK) for value in values if isinstance(value, dict)
        ]
        if not masks or not all(map(_is_full_mask, masks)):
            return self._placement.put(self._stacked(values))
        rest = [
            {name: leaf for name, leaf in value.items() if name != MASK}
            for value in values
        ]
        return self._placement.put(self._stacked(rest)) | {MASK: self._full(masks)}

    def _full(self, masks: Sequence[np.ndarray]) -> jax.Array:
        key = (len(masks), len(masks[0]))
        if key not in self._masks:
            self._masks[key] = self._placement.put(self._stacked(masks))
        return self._masks[key]

    def _stacked(self, values: Sequence[PyTree]) -> PyTree:
        return stack_batches(values) if self._options.steps_per_call > 1 else values[0]


def _is_full_mask(mask: object) -> bool:
    return isinstance(mask, np.ndarray) and mask is full_mask(len(mask))
