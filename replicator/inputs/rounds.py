"""Read one batch from every pipeline at a time, epoch after epoch, and check each.

All pipelines read one batch each, also those of other processes (`in_step`). One that
ends before the others takes part without examples until all have ended: no example is
lost or read twice.
"""

import contextlib
import dataclasses
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

from replicator.base.types import PyTree
from replicator.errors import BatchError
from replicator.inputs import checks
from replicator.inputs.adapters import Source
from replicator.inputs.checksums import checksum
from replicator.inputs.options import InputOptions
from replicator.inputs.position import Position, other_size, start_at, states_of
from replicator.inputs.remainder import HostBatch, join_read
from replicator.inputs.synchronized_reads import Read, ReadSync, SharedRead, read_alone

_END: Any = object()


def host_batches(
    sources: Sequence[Source],
    *,
    parts: int,
    kind: str,
    options: InputOptions,
    start: Position | None = None,
    in_step: ReadSync | None = None,
) -> Generator[HostBatch, None, None]:
    """Yield full-size batches until the sources, or the requested epochs, end.

    Args:
      sources: One source for each pipeline of this process.
      parts: Number of parts that share the batches of this process.
      kind: Name of these parts in the plural: "replicas".
      options: All other options.
      start: Position to begin at; the first batch if None.
      in_step: Synchronisation with other processes; None for a single process.

    Raises:
      BatchError: There is no batch at all, or one does not fit.
      NonFiniteError: A batch holds NaN.
    """
    reader = _Reader(
        sources, parts=parts, kind=kind, options=options, start=start, in_step=in_step
    )
    while options.epochs is None or reader.position.epoch < options.epochs:
        first, yielded = reader.position, 0
        with contextlib.closing(reader.epoch()) as reads:
            for shared in reads:
                batch = join_read(
                    shared,
                    reader.position,
                    accumulate=options.accumulate,
                    remainder=options.remainder,
                )
                if batch is not None:
                    yielded += 1
                    yield batch
        read = reader.position.batches - first.batches
        if read == 0 and first.batches > 0 and first.epoch_batches == 0:
            return  # an iterable that can be read only once after all
        # A run may resume at the end of an epoch, and find nothing more in it.
        if not yielded and first.epoch_batches == 0:
            raise BatchError(
                "`dataset` must yield at least one batch, got "
                f"{'none' if reader.index == 0 else 'only uneven ones, all dropped'}. "
                "Look at its source, its filters and its batch size."
            )
        if not all(source.repeats for source in sources):
            return


class _Part(NamedTuple):
    """A batch of one pipeline, and its form."""

    batch: PyTree
    form: checks.BatchForm


class _Reader:
    """Reads rounds; keeps the form of the first, and their number.

    Attributes:
      position: Position of the input after the read that was yielded last.
      index: Number of batches read before, those of earlier runs included.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        parts: int,
        kind: str,
        options: InputOptions,
        start: Position | None,
        in_step: ReadSync | None,
    ):
        self.position = start or Position()
        self.index = self.position.batches  # with those ahead of the position
        self._saved_batches = self.position.batches
        self._form: checks.BatchForm | None = None
        self._quick_form: tuple | None = None  # of a full part, for a fast check
        self._sources = sources
        self._parts, self._kind = parts, kind
        self._options = options
        self._share = in_step.read_together if in_step is not None else read_alone
        self._num_pipelines = (
            in_step.num_pipelines if in_step is not None else len(sources)
        )

    def epoch(self) -> Generator[SharedRead, None, None]:
        """Start all sources at the position in this epoch, and read them to their ends.

        `position` is that of the input after the read that was yielded last.
        """
        passes: list[Iterator[PyTree]] = []
        try:
            with contextlib.closing(self._share(self._reads(passes))) as reads:
                for shared in reads:
                    self._advance(shared)
                    yield shared
        finally:
            self._close(passes)
        self.position = dataclasses.replace(
            self.position, epoch=self.position.epoch + 1, epoch_batches=0, states=()
        )

    def _reads(self, passes: list[Iterator[PyTree]]) -> Iterator[Read]:
        # Here and not before: errors are sent to the other processes.
        passes += start_at(self._sources, self.position, self._options.reread)
        while any(parts := self._read(passes)):
            full = self._check(parts)
            states = states_of(passes)
            # Now: a producer may reuse its memory for the next batch.
            checksums = tuple(part and checksum(part.batch) for part in parts)
            self._end_short(parts, full, passes)
            self.index += 1
            assert self._form is not None
            yield Read(
                parts=[part and part.batch for part in parts],
                examples=sum(part.form.examples for part in parts if part is not None),
                full=full,
                states=states,
                checksums=checksums,
                form=self._form.leaves,
            )

    def _advance(self, shared: SharedRead) -> None:
        self.position = Position(
            batches=self.position.batches + 1,
            examples=self.position.examples + shared.examples,
            epoch=self.position.epoch,
            epoch_batches=self.position.epoch_batches + 1,
            full_batch=shared.full,
            num_pipelines=self._num_pipelines,
            states=shared.read.states,
            checksums=self.position.checksums_after(shared.read.checksums),
        )

    def _read(self, passes: list[Iterator[PyTree]]) -> list[_Part | None]:
        parts: list[_Part | None] = []
        for pipeline, batches in enumerate(passes):
            batch = next(batches, _END)
            if batch is _END:
                passes[pipeline] = iter(())
                parts.append(None)
                continue
            if self._form is not None and checks.quick_form(batch) == self._quick_form:
                parts.append(_Part(batch, self._form))
                continue
            where = self._where(pipeline)
            batch = checks.numeric_arrays(batch, where=where)
            parts.append(_Part(batch, checks.form_of(batch, where=where)))
        return parts

    def _check(self, parts: Sequence[_Part | None]) -> int:
        """Check all parts against the first form; return the size of a full part."""
        if self._form is None:
            present = [part for part in parts if part is not None]
            form = max((part.form for part in present), key=lambda f: f.examples)
            before = self.position.full_batch // self._num_pipelines
            if before and form.examples > before:
                raise self._other_size(form.examples)
            self._form = dataclasses.replace(form, examples=before or form.examples)
            self._remember_quickly(present)
            checks.check_divides(
                self._form.examples * len(parts),
                parts=self._parts,
                kind=self._kind,
                accumulate=self._options.accumulate,
                where="batch 0",
            )
        for pipeline, part in enumerate(parts):
            if part is None:
                continue
            first, where = self._form, self._where(pipeline)
            if shapes := self._options.shapes:
                first = checks.stated_form(first, part.form, shapes, where=where)
            if part.form is not first:
                checks.check_same_form(first, part.form, where=where)
            if not self._options.allow_nan:
                checks.check_no_nan(part.batch, where=where)
        return self._form.examples

    def _remember_quickly(self, parts: Sequence[_Part]) -> None:
        assert self._form is not None
        for part in parts:
            if part.form.examples == self._form.examples:
                self._quick_form = checks.quick_form(part.batch)

    def _end_short(
        self,
        parts: Sequence[_Part | None],
        full: int,
        passes: list[Iterator[PyTree]],
    ) -> None:
        """Check that each short part is the last of its pipeline."""
        for pipeline, part in enumerate(parts):
            if part is None or part.form.examples == full:
                continue
            if next(passes[pipeline], _END) is not _END:
                if self.index == self._saved_batches > 0:
                    raise self._other_size(part.form.examples)
                raise BatchError(
                    f"`dataset` must yield {full} examples in every batch but the last "
                    f"of an epoch, got {part.form.examples} and another batch after it "
                    f"({self._where(pipeline)}). Make the batches of the input equal."
                )
            passes[pipeline] = iter(())

    def _other_size(self, found: int) -> BatchError:
        saved = self.position.full_batch
        return other_size(found * self._num_pipelines, saved)

    def _close(self, passes: Sequence[Iterator[PyTree]]) -> None:
        # A user's iterator may be read on after this: close only iterators made here.
        # There are none if starting them failed.
        for source, batches in zip(self._sources, passes, strict=False):
            close = getattr(batches, "close", None)
            if source.repeats and close is not None:
                close()

    def _where(self, pipeline: int) -> str:
        if len(self._sources) == 1:
            return f"batch {self.index}"
        return f"batch {self.index} of pipeline {pipeline}"
