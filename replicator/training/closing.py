"""Close what was opened, whatever happens in between."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from replicator.writers.multi import call_all


@contextmanager
def closed_at_the_end(closers: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Call all `closers` at the end, also after an error.

    What they raise after another error is noted on that error.

    Args:
      closers: Called in order; one that fails does not keep the others from it. A list
        may change until then.

    Raises:
      Exception: What the first closer raised, if nothing failed before.
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
