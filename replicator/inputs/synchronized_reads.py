"""Let the pipelines of all processes read in step, by exchange, to one common end.

Every process must dispatch the same steps, so none may use a batch before it is known
that each has one. They tell each other how many they have read, a window at a time, in
the thread that reads ahead; the devices never wait for it. A process whose pipelines
have ended takes part with nothing until all have ended. What goes wrong in one of them
is an error in all.
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
_MOST_READS_OF_ONCE = 2  # of what is read once little is read ahead: it may be new
# Another process may be busy with something else for hours, and read nothing. Who wants
# a batch meanwhile waits for `InputOptions.timeout_s`; one that dies ends the wait.
_LONGEST_S = 86_400.0
_numbers = itertools.count()


class Read(NamedTuple):
    """One batch of every pipeline of this process.

    Attributes:
      parts: Arrays by pipeline; None where a pipeline has ended.
      examples: How many they hold.
      full: Examples in a full part.
      states: Where the pipelines are after it, if they say so.
      checksums: Of what each pipeline read; None where that is not known.
      form: What all parts look like: dtype and shape by path.
    """

    parts: Sequence[PyTree | None]
    examples: int
    full: int
    states: tuple = ()
    checksums: tuple[int | None, ...] = ()
    form: Mapping[str, str] = MappingProxyType({})


class Turn(NamedTuple):
    """A read, and what it is a part of.

    Attributes:
      read: What this process contributes, perhaps no example.
      examples: How many all processes contribute.
      full: How many they would if it were a full batch.
      sample: Rows to fill up with where this process has none.
    """

    read: Read
    examples: int
    full: int
    sample: PyTree = None


def by_itself(reads: Iterator[Read]) -> Generator[Turn, None, None]:
    """Take turns in a process that reads all there is."""
    for read in reads:
        full = read.full * len(read.parts)
        yield Turn(read=read, examples=read.examples, full=full)


class ReadSync:
    """Takes turns with the other processes of a mesh; one object for an input.

    All processes open the same inputs in the same order.

    Args:
      num_pipelines: Of all processes; with one, each reads the same, whole batches.
      once: Whether some of what is read can be read only once.
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

    def turns(self, reads: Iterator[Read]) -> Generator[Turn, None, None]:
        """Take turns until the reads of all processes have ended.

        Raises:
          BatchError: A process failed to read, or has none or another kind of batches.
          DistributedError: A process is missing, or has stopped to read.
          Exception: What reading here raised.
        """
        checked = False
        while True:
            found, failure = self._read_window(reads)
            # The first batch of a pass tells whether all read the same.
            look = self._shared and not checked and bool(found)
            content = found[0].checksums[0] if look else None
            if look and content is None:  # it lies on a device: once, it may wait
                content = checksum(jax.tree.map(np.asarray, found[0].parts[0]))
            checked = checked or look
            said = self._exchange(self._word(found, failure, content))
            if failure is not None:
                self._over = True
                raise failure
            yield from self._closing(self._turns(found, said))
            if all(word["ended"] for word in said):
                return

    def _read_window(
        self, reads: Iterator[Read]
    ) -> tuple[list[Read], Exception | None]:
        found: list[Read] = []
        try:
            for read in itertools.islice(reads, self._size):
                # A producer may use its memory again for the next of the window.
                found.append(_copied(read) if self._size > 1 else read)
                self._first = self._first or _copied(read)
        except Exception as failure:  # told to the others, then raised
            return found, failure
        return found, None

    def _word(
        self, found: list[Read], failure: Exception | None, content: int | None
    ) -> dict[str, Any]:
        """Say what this process has for the window."""
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

    def _turns(self, found: list[Read], said: list[dict]) -> Iterator[Turn]:
        self._refuse(said)
        most = max(len(word["examples"]) for word in said)
        own = found + [self._nothing()] * (most - len(found)) if most else []
        full = [word["full"] * word["parts"] for word in said] if most else []
        for index, read in enumerate(own):
            counts = [dict(enumerate(word["examples"])).get(index, 0) for word in said]
            yield Turn(
                read=read,
                examples=counts[0] if self._shared else sum(counts),
                full=full[0] if self._shared else sum(full),
                sample=self._sample,
            )
        nbytes = max(word["bytes"] for word in said)
        limit = min(word["most"] for word in said)
        room = max(1, min(limit, _MOST_BYTES // max(nbytes, 1)))
        self._size = min(2 * self._size, room)

    def _nothing(self) -> Read:
        assert self._first is not None
        if self._sample is None:
            self._sample = next(part for part in self._first.parts if part is not None)
        nobody = [None] * len(self._first.parts)
        return Read(parts=nobody, examples=0, full=self._first.full)

    def _refuse(self, said: list[dict]) -> None:
        """Raise in every process what is wrong in one."""
        self._over = True
        for process, word in enumerate(said):
            if word["closed"]:
                raise DistributedError(
                    f"`dataset` must be read by all processes alike, but process "
                    f"{process} has stopped to read. See why it ended first."
                )
            if word["error"] is not None:
                raise BatchError(
                    f"`dataset` must be readable in every process, got an error in "
                    f"process {process}: {word['error']}"
                )
        _refuse_odd(said, "full", "batches of as many examples")
        _refuse_odd(said, "form", "the same leaves")
        if self._shared:
            _refuse_odd(said, "examples", "the same global batches")
            _refuse_odd(said, "content", "the same global batches")
        self._over = False

    def _closing(self, turns: Iterator[Turn]) -> Generator[Turn, None, None]:
        try:
            yield from turns
        except GeneratorExit:
            # Others may wait for our next word; those that stop with us say the same.
            if not self._over:
                self._over = True
                self._exchange({"closed": True})
            raise


def read_sync_over(mesh: Mesh, *, num_pipelines: int, once: bool) -> ReadSync | None:
    """Return what keeps the processes of a mesh in step; None if it has only one."""
    if not spans_processes(mesh):
        return None
    return ReadSync(num_pipelines=num_pipelines, once=once)


def _refuse_odd(said: list[dict], field: str, must: str) -> None:
    words = [word[field] for word in said]
    if odd := first_odd(words):
        process, other = odd
        raise BatchError(
            f"`dataset` must yield {must} in every process, got "
            f"{_told(words[process])} in process {process} and {_told(words[other])} "
            f"in process {other}. Seed and cut the input alike everywhere, or write "
            "`def input_fn(context)`."
        )


def _told(word: Any) -> str:
    if word is None:
        return "no batch"
    if isinstance(word, int):
        return f"{word}"
    if isinstance(word, dict):
        return ", ".join(f"`{path}` {rows}" for path, rows in word.items())
    return f"batches of {word} examples"


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
