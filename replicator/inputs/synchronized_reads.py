"""Read the same number of batches in all processes, by exchange, to a common end.

Every process must dispatch the same steps, so none may use a batch before it is known
that each has one. They exchange how many they have read, a window at a time, in the
thread that reads ahead; the devices never wait for it. A process whose pipelines have
ended takes part without examples until all have ended. An error in one process is
raised in all.
"""

import functools
import itertools
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from replicator.base.mesh import spans_processes
from replicator.base.types import PyTree
from replicator.distributed.agreement import exchange, first_odd
from replicator.errors import BatchError, DistributedError
from replicator.inputs.checksums import checksum

_MOST_BYTES, _MOST_READS = 2**20, 32
_MOST_READS_OF_ONCE = 2  # an iterator may yield new data: read little ahead
# Another process may be busy for hours, and read nothing. A consumer of batches waits
# meanwhile for `InputOptions.timeout_s`; the death of a process ends the wait.
_LONGEST_S = 86_400.0
_numbers = itertools.count()


class Read(NamedTuple):
    """One batch of every pipeline of this process.

    Attributes:
      parts: Arrays by pipeline; None for a pipeline that has ended.
      examples: Number of examples in them.
      full: Examples in a full part.
      states: States of the pipelines after it, if they have any.
      checksums: Checksum of each part; None if unknown.
      form: Dtype and shape of all parts, by path.
    """

    parts: Sequence[PyTree | None]
    examples: int
    full: int
    states: tuple = ()
    checksums: tuple[int | None, ...] = ()
    form: Mapping[str, str] = MappingProxyType({})


class SharedRead(NamedTuple):
    """A read of this process, as a part of a global batch.

    Attributes:
      read: Read of this process, perhaps without examples.
      examples: Number of examples of all processes.
      full: Number of examples of a full batch.
      sample: Rows to fill up with if this process has none.
    """

    read: Read
    examples: int
    full: int
    sample: PyTree = None


def read_alone(reads: Iterator[Read]) -> Generator[SharedRead, None, None]:
    """Yield the reads of a process that reads whole batches.

    >>> [one.full for one in read_alone(iter([Read(parts=[None], examples=0, full=8)]))]
    [8]
    """
    for read in reads:
        full = read.full * len(read.parts)
        yield SharedRead(read=read, examples=read.examples, full=full)


class ReadSync:
    """Synchronises reads with the other processes of a mesh; one object per input.

    All processes open the same inputs in the same order.

    Args:
      num_pipelines: Number of pipelines of all processes; with one, each process reads
        the same, whole batches.
      once: Whether a source can be read only once.
    """

    def __init__(self, *, num_pipelines: int, once: bool) -> None:
        self.num_pipelines = num_pipelines
        self._shared = num_pipelines == 1
        self._name = f"input-{next(_numbers)}"
        self._exchange = functools.partial(exchange, self._name, timeout_s=_LONGEST_S)
        self._most = _MOST_READS_OF_ONCE if once else _MOST_READS
        self._size = 1  # reads in a window: the first batch must not wait for others
        self._first: Read | None = None
        self._sample: PyTree = None
        self._over = False

    def read_together(self, reads: Iterator[Read]) -> Generator[SharedRead, None, None]:
        """Yield reads until those of all processes have ended.

        Raises:
          BatchError: A process failed to read, or has no or other batches.
          DistributedError: A process is missing, or has stopped reading.
          Exception: Any error of reading in this process.
        """
        checked = False
        while True:
            found, failure = self._read_window(reads)
            # The first batch of a pass shows whether all read the same.
            look = self._shared and not checked and bool(found)
            content = found[0].checksums[0] if look else None
            if look and content is None:  # on a device: waiting once is acceptable
                content = checksum(jax.tree.map(np.asarray, found[0].parts[0]))
            checked = checked or look
            reports = self._exchange(self._report(found, failure, content))
            if failure is not None:
                self._over = True
                raise failure
            yield from self._closing(self._join(found, reports))
            if all(report["ended"] for report in reports):
                return

    def _read_window(
        self, reads: Iterator[Read]
    ) -> tuple[list[Read], Exception | None]:
        found: list[Read] = []
        try:
            for read in itertools.islice(reads, self._size):
                # A producer may reuse its memory for the next read of the window.
                found.append(_copied(read) if self._size > 1 else read)
                self._first = self._first or _copied(read)
        except Exception as failure:  # sent to the others, then raised
            return found, failure
        return found, None

    def _report(
        self, found: list[Read], failure: Exception | None, content: int | None
    ) -> dict[str, Any]:
        """Describe the window of this process."""
        first = self._first
        return {
            "examples": [read.examples for read in found],
            "ended": len(found) < self._size,
            "full": None if first is None else first.full,
            "parts": 0 if first is None else len(first.parts),
            "bytes": 0 if first is None else _nbytes(first),
            "form": None if first is None else dict(first.form),
            "content": content,
            "most": self._most,
            "error": None if failure is None else f"{failure}",
            "closed": False,
        }

    def _join(self, found: list[Read], reports: list[dict]) -> Iterator[SharedRead]:
        self._refuse(reports)
        most = max(len(each["examples"]) for each in reports)
        own = found + [self._nothing()] * (most - len(found)) if most else []
        full = [each["full"] * each["parts"] for each in reports] if most else []
        for index, read in enumerate(own):
            counts = [dict(enumerate(one["examples"])).get(index, 0) for one in reports]
            yield SharedRead(
                read=read,
                examples=counts[0] if self._shared else sum(counts),
                full=full[0] if self._shared else sum(full),
                sample=self._sample,
            )
        nbytes = max(each["bytes"] for each in reports)
        limit = min(each["most"] for each in reports)
        room = max(1, min(limit, _MOST_BYTES // max(nbytes, 1)))
        self._size = min(2 * self._size, room)

    def _nothing(self) -> Read:
        assert self._first is not None
        if self._sample is None:
            self._sample = next(part for part in self._first.parts if part is not None)
        nobody = [None] * len(self._first.parts)
        return Read(parts=nobody, examples=0, full=self._first.full)

    def _refuse(self, reports: list[dict]) -> None:
        """Raise an error of one process in every process."""
        self._over = True
        for process, report in enumerate(reports):
            if report["closed"]:
                raise DistributedError(
                    f"`dataset` must be read by all processes alike, but process "
                    f"{process} has stopped reading. See why it ended first."
                )
            if report["error"] is not None:
                raise BatchError(
                    f"`dataset` must be readable in every process, got an error in "
                    f"process {process}: {report['error']}"
                )
        _refuse_odd(reports, "full", "batches of as many examples")
        _refuse_odd(reports, "form", "the same leaves")
        if self._shared:
            _refuse_odd(reports, "examples", "the same global batches")
            _refuse_odd(reports, "content", "the same global batches")
        self._over = False

    def _closing(
        self, reads: Iterator[SharedRead]
    ) -> Generator[SharedRead, None, None]:
        try:
            yield from reads
        except GeneratorExit:
            # Others may wait for this process's next report; those that stop at the
            # same time send the same.
            if not self._over:
                self._over = True
                self._exchange({"closed": True})
            raise


def read_sync_over(mesh: Mesh, *, num_pipelines: int, once: bool) -> ReadSync | None:
    """Return the synchronisation of reads over a mesh; None for a single process."""
    if not spans_processes(mesh):
        return None
    return ReadSync(num_pipelines=num_pipelines, once=once)


def _refuse_odd(reports: list[dict], field: str, must: str) -> None:
    values = [report[field] for report in reports]
    if odd := first_odd(values):
        process, other = odd
        raise BatchError(
            f"`dataset` must yield {must} in every process, got "
            f"{_text(values[process])} in process {process} and {_text(values[other])} "
            f"in process {other}. Seed and cut the input alike everywhere, or write "
            "`def input_fn(context)`."
        )


def _text(value: Any) -> str:
    if value is None:
        return "no batch"
    if isinstance(value, int):
        return f"{value}"
    if isinstance(value, dict):
        return ", ".join(f"`{path}` {rows}" for path, rows in value.items())
    return f"batches of {value} examples"


def _copied(read: Read) -> Read:
    def copy(leaf: Any) -> Any:
        return leaf if isinstance(leaf, jax.Array) else np.array(leaf)

    parts = [part if part is None else jax.tree.map(copy, part) for part in read.parts]
    return read._replace(parts=parts)


def _nbytes(read: Read) -> int:
    leaves = jax.tree.leaves(list(read.parts))
    return sum(
        math.prod(np.shape(leaf)) * np.dtype(leaf.dtype).itemsize for leaf in leaves
    )
