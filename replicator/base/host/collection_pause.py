"""Keep Python's collector of cycles from looking at what is being traced."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no cycles meanwhile: to trace makes many objects, and nearly all stay.

    The collector would look at all of them again and again.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # What was made counts as old, or the next collection would look at it all.
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()
