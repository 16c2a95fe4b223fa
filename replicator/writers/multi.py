"""Write the same numbers to several writers."""

from collections.abc import Callable, Iterable, Mapping

from replicator.writers.writer import Writer, check_writer


class Multi:
    """Hand everything to each of `writers`, in order.

    If one fails, the others still get the numbers; its error is raised after that.

    Raises:
      ArgumentError: One of them is not a writer.

    >>> copy = replicator.writers.JSONL("copy.jsonl")
    >>> writer = Multi(replicator.writers.JSONL("metrics.jsonl"), copy)
    >>> writer.close()
    """

    def __init__(self, *writers: Writer):
        for writer in writers:
            check_writer("writers", writer)
        self._writers = writers

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write to all."""
        call_all(lambda w=writer: w.write(step, scalars) for writer in self._writers)

    def flush(self) -> None:
        """Flush all."""
        call_all(writer.flush for writer in self._writers)

    def close(self) -> None:
        """Close all."""
        call_all(writer.close for writer in self._writers)


def call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Make all calls in order, even after one failed; then raise the first error.

    Later errors are notes of the first.

    >>> call_all([lambda: print("first"), lambda: print("second")])
    first
    second
    """
    failures: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as failure:
            failures.append(failure)
    if failures:
        first, *others = failures
        for other in others:
            first.add_note(f"After this, another failed: {other!r}")
        raise first
