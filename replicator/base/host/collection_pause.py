"""Pause Python's cycle collector while JAX traces."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no cycles meanwhile: tracing makes many objects, and nearly all stay.

    The collector would scan all of them again and again. The switch is the process's:
    other threads collect nothing either until then. Of two threads that pause, the
    first to finish turns collection on again, which only costs time.

    >>> with collection_paused():
    ...     jaxpr = jax.make_jaxpr(jnp.sin)(0.0)
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # Make new objects old, or the next collection would scan them all. Objects that
        # the user froze must not be thawed.
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()
