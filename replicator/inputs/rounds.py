"""Read one batch from every pipeline at a time, epoch after epoch, and check each.

Pipelines go in step, also those of other processes (`in_step`). One that ends before
the others takes part with no example until all have ended: nothing is lost, nothing is
read twice.
"""

import contextlib
import dataclasses
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

from replicator.base.types import PyTree
from replicator.errors import BatchError
from replicator.inputs.adapters import Source
from replicator.inputs.checks import (
    BatchForm,
    check_divides,
    check_no_nan,
    check_same_form,
    form_of,
    numeric_arrays,
    quick_form,
    stated_form,
)
from replicator.inputs.checksums import checksum
from replicator.inputs.options import InputOptions
from replicator.inputs.position import Position, other_size, start_at, tell
from replicator.inputs.remainder import HostBatch, join_turn
from replicator.inputs.synchronized_reads import Read, ReadSync, Turn, by_itself

_END: Any = object()


def host_batches(
    sources: Sequence[Source],
    *,
    parts: int,
    of: str,
    options: InputOptions,
    start: Position | None = None,
    in_step: ReadSync | None = None,
) -> Generator[HostBatch, None, None]:
    """Yield full-size batches until the sources, or the asked-for epochs, end.

    Args:
      sources: One for each pipeline of this process.
      parts: How many share the batches of this process.
      of: What shares them, in the plural.
      options: Everything else.
      start: Where to begin; at the first batch if None.
      in_step: The other processes; None where this one reads by itself.

    Raises:
      BatchError: There is no batch at all, or one does not fit.
      NonFiniteError: A batch holds NaN.
    """
    reader = _Reader(
        sources, parts=parts, of=of, options=options, start=start, in_step=in_step
    )
    while options.epochs is None or reader.position.epoch < options.epochs:
        first, yielded = reader.position, 0
        with contextlib.closing(reader.epoch()) as turns:
            for turn in turns:
                batch = join_turn(
                    turn,
                    reader.position,
                    accumulate=options.accumulate,
                    remainder=options.remainder,
                )
                if batch is not None:
                    yielded += 1
                    yield batch
        read = reader.position.batches - first.batches
        if read == 0 and first.batches > 0 and first.epoch_batches == 0:
            return  # it calls itself an iterable, and can be read only once
        # A run may go on right where an epoch had ended, and find nothing more in it.
        if not yielded and first.epoch_batches == 0:
            raise BatchError(
                "`dataset` must yield at least one batch, got "
                f"{'none' if reader.index == 0 else 'only uneven ones, all dropped'}. "
                "Look at its source, its filters and its batch size."
            )
        if not all(source.repeats for source in sources):
            return


class _Part(NamedTuple):
    """What one pipeline read, and its form."""

    batch: PyTree
    form: BatchForm


class _Reader:
    """Reads rounds; remembers the form of the first and how many there were."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        parts: int,
        of: str,
        options: InputOptions,
        start: Position | None,
        in_step: ReadSync | None,
    ):
        self.position = start or Position()
        self._read_before = self.position.batches  # what is ahead of the position, too
        self._saved_batches = self.position.batches
        self._form: BatchForm | None = None
        self._quick_form: tuple | None = None  # of a full part, to tell its like fast
        self._sources = sources
        self._parts, self._of = parts, of
        self._options = options
        self._take_turns = in_step.turns if in_step is not None else by_itself
        self._num_pipelines = (
            in_step.num_pipelines if in_step is not None else len(sources)
        )

    @property
    def index(self) -> int:
        """How many batches were read before, by earlier runs too."""
        return self._read_before

    def epoch(self) -> Generator[Turn, None, None]:
        """Start all sources where this epoch stands, and read them to their ends.

        `position` is where the input is after the turn that was yielded last.
        """
        passes: list[Iterator[PyTree]] = []
        try:
            with contextlib.closing(self._take_turns(self._reads(passes))) as turns:
                for turn in turns:
                    self._advance(turn)
                    yield turn
        finally:
            self._close(passes)
        self.position = dataclasses.replace(
            self.position, epoch=self.position.epoch + 1, epoch_batches=0, states=()
        )

    def _reads(self, passes: list[Iterator[PyTree]]) -> Iterator[Read]:
        # Here and not before: what goes wrong is told to the other processes.
        passes += start_at(self._sources, self.position, self._options.reread)
        while any(parts := self._read(passes)):
            full = self._check(parts)
            states = tell(passes)
            # Now: a producer may use its memory again for the next batch.
            checksums = tuple(part and checksum(part.batch) for part in parts)
            self._end_short(parts, full, passes)
            self._read_before += 1
            assert self._form is not None
            yield Read(
                parts=[part and part.batch for part in parts],
                examples=sum(part.form.examples for part in parts if part is not None),
                full=full,
                states=states,
                checksums=checksums,
                form=self._form.leaves,
            )

    def _advance(self, turn: Turn) -> None:
        self.position = Position(
            batches=self.position.batches + 1,
            examples=self.position.examples + turn.examples,
            epoch=self.position.epoch,
            epoch_batches=self.position.epoch_batches + 1,
            full_batch=turn.full,
            num_pipelines=self._num_pipelines,
            states=turn.read.states,
            checksums=self.position.checksums_after(turn.read.checksums),
        )

    def _read(self, passes: list[Iterator[PyTree]]) -> list[_Part | None]:
        parts: list[_Part | None] = []
        for pipeline, batches in enumerate(passes):
            batch = next(batches, _END)
            if batch is _END:
                passes[pipeline] = iter(())
                parts.append(None)
                continue
            if self._form is not None and quick_form(batch) == self._quick_form:
                parts.append(_Part(batch, self._form))
                continue
            where = self._where(pipeline)
            batch = numeric_arrays(batch, where=where)
            parts.append(_Part(batch, form_of(batch, where=where)))
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
            check_divides(
                self._form.examples * len(parts),
                parts=self._parts,
                of=self._of,
                accumulate=self._options.accumulate,
                where="batch 0",
            )
        for pipeline, part in enumerate(parts):
            if part is None:
                continue
            first, where = self._form, self._where(pipeline)
            if shapes := self._options.shapes:
                first = stated_form(first, part.form, shapes, where=where)
            if part.form is not first:
                check_same_form(first, part.form, where=where)
            if not self._options.allow_nan:
                check_no_nan(part.batch, where=where)
        return self._form.examples

    def _remember_quickly(self, parts: Sequence[_Part]) -> None:
        assert self._form is not None
        for part in parts:
            if part.form.examples == self._form.examples:
                self._quick_form = quick_form(part.batch)

    def _end_short(
        self,
        parts: Sequence[_Part | None],
        full: int,
        passes: list[Iterator[PyTree]],
    ) -> None:
        """Look past each short part: it must be the last of its pipeline."""
        for pipeline, part in enumerate(parts):
            if part is None or part.form.examples == full:
                continue
            if next(passes[pipeline], _END) is not _END:
                if self._read_before == self._saved_batches > 0:
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
        # An iterator that the user made may be read on after us: we close only ours.
        # There are none where to start them failed.
        for source, batches in zip(self._sources, passes, strict=False):
            close = getattr(batches, "close", None)
            if source.repeats and close is not None:
                close()

    def _where(self, pipeline: int) -> str:
        if len(self._sources) == 1:
            return f"batch {self.index}"
        return f"batch {self.index} of pipeline {pipeline}"
