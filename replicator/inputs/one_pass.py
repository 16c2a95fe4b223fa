"""Read every example of a dataset exactly once, in order, in batches of one size.

For an evaluation: the examples are cut anew, so that their place in the stream depends
neither on the batches of the dataset nor on the number of replicas. The last batch is
filled up with copies of its examples, and `mask` is 0 for those.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence

import jax
import numpy as np

from replicator.base.types import Dataset, PyTree
from replicator.errors import check_kind
from replicator.inputs import checks
from replicator.inputs.adapters import Source, ending, is_input_fn, open_sources
from replicator.inputs.context import BatchLayout, pipeline_contexts
from replicator.inputs.feed import placed_batches
from replicator.inputs.options import DEFAULT_PREFETCH, InputOptions, refuse_shapes
from replicator.inputs.placement import Placed
from replicator.inputs.prefetch import Prefetcher
from replicator.inputs.remainder import MASK, examples_of, fill_up

BATCH = "batch"


def open_one_pass(
    dataset: Dataset,
    layout: BatchLayout,
    *,
    replica_batch: int,
    blocks: int = 1,
    options: InputOptions | None = None,
) -> Prefetcher[PyTree]:
    """Read a dataset with batches of any sizes once, in the background.

    Args:
      dataset: As in `open_input`; it must be finite.
      layout: Layout of batches on devices.
      replica_batch: Examples per replica and batch.
      blocks: Number of equal blocks of one replica's examples, each cut over devices.
      options: Options of reading; `steps` counts batches of the dataset, and
        `accumulate`, `steps_per_call`, `epochs` and `remainder` have no effect.

    Returns:
      An iterator of global arrays `{"batch": ..., "mask": ...}`: leaves [replicas *
      replica_batch, ...], or [blocks, replica_batch / blocks, ...] for more than one
      block, and 0 in `mask` for examples that only fill up.

    Raises:
      ArgumentError: `dataset` cannot be read in this mode.
    """
    check_kind("inputs", options, InputOptions)
    options = options or InputOptions()
    refuse_shapes(options, "where examples are cut anew")
    if options.steps is None:
        dataset = ending("dataset", dataset, adapters=options.adapters)
    contexts = pipeline_contexts(
        options.mode, layout, by_function=is_input_fn(dataset, options.adapters)
    )
    sources = open_sources(dataset, contexts, adapters=options.adapters)
    size = layout.num_replicas * replica_batch // contexts[0].num_pipelines
    reading = dataclasses.replace(
        options,
        accumulate=1,
        steps_per_call=1,
        steps=None,
        epochs=1,
        remainder="mask",
        allow_nan=True,  # `recut` checks, where the dataset's own batches are known
    )
    recut_sources = [_recut_source(source, size, options) for source in sources]
    return Prefetcher(
        _values(
            placed_batches(recut_sources, contexts, layout, reading, blocks=blocks)
        ),
        size=options.prefetch or DEFAULT_PREFETCH,
        timeout_s=options.timeout_s,
    )


def recut(
    batches: Iterable[PyTree], size: int, *, allow_nan: bool = False
) -> Iterator[PyTree]:
    """Join and cut batches, of any sizes, to batches of `size`.

    >>> [batch["mask"] for batch in recut([{"x": np.zeros(3)}], 2)]
    [array([1., 1.], dtype=float32), array([1., 0.], dtype=float32)]

    Args:
      batches: Pytrees of arrays with one leading size.
      size: Examples in each batch that is yielded.
      allow_nan: Take batches that hold NaN.

    Yields:
      `{"batch": rows, "mask": float32 [size]}` in memory of their own.

    Raises:
      BatchError: A batch does not fit the first one.
      NonFiniteError: A batch holds NaN.
    """
    form: checks.BatchForm | None = None
    pieces: list[PyTree] = []  # of the batch that is being filled
    count = 0
    for index, batch in enumerate(batches):
        where = f"batch {index}"
        arrays = checks.numeric_arrays(batch, where=where)
        found = checks.form_of(arrays, where=where)
        form = form or found
        expected = dataclasses.replace(form, examples=found.examples)
        checks.check_same_form(expected, found, where=where)
        if not allow_nan:
            checks.check_no_nan(arrays, where=where)
        rows, start = jax.tree.map(np.asarray, arrays), 0
        while start < found.examples:
            taken = slice(start, min(start + size - count, found.examples))
            pieces.append(jax.tree.map(lambda leaf, taken=taken: leaf[taken], rows))
            count += taken.stop - start
            start = taken.stop
            if count == size:
                yield _joined(pieces, size)
                pieces, count = [], 0
        if pieces:  # a producer may reuse its memory for the next batch
            pieces[-1] = jax.tree.map(np.array, pieces[-1])
    if pieces:
        yield _joined(pieces, size)


def _values(batches: Generator[Placed, None, None]) -> Generator[PyTree, None, None]:
    with contextlib.closing(batches):
        for batch in batches:
            yield batch.value


def _recut_source(source: Source, size: int, options: InputOptions) -> Source:
    def start() -> Iterator[PyTree]:
        batches = source.start()
        try:
            limited = itertools.islice(batches, options.steps)
            yield from recut(limited, size, allow_nan=options.allow_nan)
        finally:
            # An iterator that the user made may be read on after us.
            close = getattr(batches, "close", None)
            if source.repeats and close is not None:
                close()

    return Source(start=start, repeats=source.repeats)


def _joined(pieces: Sequence[PyTree], size: int) -> PyTree:
    """Make one batch of rows; what is missing are its own rows in turn."""
    rows = jax.tree.map(lambda *leaves: _concatenated(leaves), *pieces)
    real = np.arange(size) < examples_of(rows)
    return {BATCH: fill_up(rows, size), MASK: real.astype(np.float32)}


def _concatenated(leaves: Sequence[np.ndarray]) -> np.ndarray:
    whole = np.concatenate(leaves)
    return whole.astype(checks.canonical_dtype(whole.dtype), copy=False)
