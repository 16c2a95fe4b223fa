"""Close all parts of a run, also after an error."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from replicator.writers.multi import call_all


@contextmanager
def close_all(closers: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Call all `closers` at the end, also after an error.

    If they fail after another error, that error gets a note.

    >>> with close_all([lambda: print("closed")]):
    ...     print("open")
    open
    closed

    Args:
      closers: Called in order, also those after one that fails. A list may change
        until then.

    Raises:
      Exception: The error of the first closer that failed, if nothing failed before.
    """
    try:
        yield
    except BaseException as failure:
        try:
            call_all(closers)
        except Exception as problem:
            failure.add_note(f"Closing failed, too: {problem!r}")
        raise
    call_all(closers)
