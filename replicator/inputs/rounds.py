"""Read one batch from every pipeline at a time, epoch after epoch, and check each.

Pipelines go in step. One that ends before the others takes part with no example until
all have ended: nothing is lost, nothing is read twice.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from replicator.errors import BatchError
from replicator.inputs.adapters import Source
from replicator.inputs.checks import (
    BatchForm,
    check_divides,
    check_no_nan,
    check_same_form,
    form_of,
    numeric_arrays,
)
from replicator.inputs.options import InputOptions
from replicator.inputs.remainder import HostBatch, Round, join_round
from replicator.protocols import PyTree

_END: Any = object()


def host_batches(
    sources: Sequence[Source], *, replicas: int, options: InputOptions
) -> Iterator[HostBatch]:
    """Yield full-size batches until the sources, or the asked-for epochs, end.

    Args:
      sources: One for each pipeline of this process.
      replicas: How many share the batches of this process.
      options: Everything else.

    Raises:
      BatchError: There is no batch at all, or one does not fit.
      NonFiniteError: A batch holds NaN.
    """
    reader = _Reader(sources, replicas=replicas, options=options)
    epochs = itertools.count() if options.epochs is None else range(options.epochs)
    for _ in epochs:
        first_index, yielded = reader.index, 0
        for found in reader.epoch():
            batch = join_round(
                found, accumulate=options.accumulate, remainder=options.remainder
            )
            if batch is not None:
                yielded += 1
                yield batch
        if first_index == reader.index > 0:
            return  # it calls itself an iterable, and can be read only once
        if not yielded:
            raise BatchError(
                "`dataset` must yield at least one batch, got "
                f"{'none' if reader.index == 0 else 'only uneven ones, all dropped'}. "
                "Look at its source, its filters and its batch size."
            )
        if not all(source.repeats for source in sources):
            return


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """What one pipeline read, its form, and its place for error messages."""

    batch: PyTree
    form: BatchForm
    where: str


class _Reader:
    """Reads rounds; remembers the form of the first and how many there were."""

    def __init__(
        self, sources: Sequence[Source], *, replicas: int, options: InputOptions
    ):
        self.index = 0
        self._form: BatchForm | None = None
        self._sources = sources
        self._replicas = replicas
        self._options = options

    def epoch(self) -> Iterator[Round]:
        """Start all sources and read them to their ends."""
        passes = [source.start() for source in self._sources]
        try:
            while any(parts := self._read(passes)):
                full = self._check(parts)
                self._end_short(parts, full, passes)
                batches = [part and part.batch for part in parts]
                found = Round(parts=batches, index=self.index, full=full)
                self.index += 1
                yield found
        finally:
            self._close(passes)

    def _read(self, passes: list[Iterator[PyTree]]) -> list[_Part | None]:
        parts: list[_Part | None] = []
        for pipeline, batches in enumerate(passes):
            batch = next(batches, _END)
            if batch is _END:
                passes[pipeline] = iter(())
                parts.append(None)
                continue
            where = self._where(pipeline)
            batch = numeric_arrays(batch, where=where)
            form = form_of(batch, where=where)
            parts.append(_Part(batch=batch, form=form, where=where))
        return parts

    def _check(self, parts: Sequence[_Part | None]) -> int:
        """Check all parts against the first form; return the size of a full part."""
        present = [part for part in parts if part is not None]
        if self._form is None:
            self._form = max((part.form for part in present), key=lambda f: f.examples)
            check_divides(
                self._form.examples * len(parts),
                replicas=self._replicas,
                accumulate=self._options.accumulate,
                where="batch 0",
            )
        for part in present:
            check_same_form(self._form, part.form, where=part.where)
            if not self._options.allow_nan:
                check_no_nan(part.batch, where=part.where)
        return self._form.examples

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
                raise BatchError(
                    f"`dataset` must yield {full} examples in every batch but the last "
                    f"of an epoch, got {part.form.examples} and another batch after it "
                    f"({part.where}). Make the batches of the input equal."
                )
            passes[pipeline] = iter(())

    def _close(self, passes: Sequence[Iterator[PyTree]]) -> None:
        # An iterator that the user made may be read on after us: we close only ours.
        for source, batches in zip(self._sources, passes, strict=True):
            close = getattr(batches, "close", None)
            if source.repeats and close is not None:
                close()

    def _where(self, pipeline: int) -> str:
        if len(self._sources) == 1:
            return f"batch {self.index}"
        return f"batch {self.index} of pipeline {pipeline}"
